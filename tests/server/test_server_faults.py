"""Back-pressure, clients that leave, and shutdown."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from fastapi.testclient import TestClient
from starlette.requests import ClientDisconnect
from tests.serving import Running, until

from dejakv.http.errors import ClientGoneError, RefusedError
from dejakv.pipeline import Pipeline
from dejakv.request import Request, Sampling
from dejakv.server.app import create_app
from dejakv.server.jobs import RequestWorker
from dejakv.server.routes_generate import EventStream
from dejakv.server.settings import ServerSettings

LONG = Request("long", "ann lives in paris. " * 40, "x", sampling=Sampling(900))
SHORT = Request("short", "ann lives in paris.", "x", sampling=Sampling(1))


class Endless:
    """An engine's `generation_config` without an end token, so that a request takes as long as it may."""

    def __init__(self, engine: Any) -> None:
        self.config = engine.model.generation_config
        self.before = (self.config.eos_token_id, self.config.suppress_tokens)

    def __enter__(self) -> None:
        self.config.suppress_tokens = [2]

    def __exit__(self, *_: object) -> None:
        self.config.eos_token_id, self.config.suppress_tokens = self.before


async def first_piece(job: Any) -> None:
    """Returns when the engine is in the middle of a job."""
    assert isinstance(await job.pieces.get(), str)


def test_a_full_queue_refuses_at_once_and_a_leaving_client_stops_the_engine(engine: Any) -> None:
    async def scenario() -> None:
        worker = RequestWorker(Pipeline(engine), max_queue=1)
        running = worker.submit(LONG)
        await first_piece(running)
        worker.submit(SHORT)
        with pytest.raises(RefusedError, match="1 requests are waiting"):
            worker.submit(SHORT)
        running.cancel()
        with pytest.raises(ClientGoneError):
            await running.answer()
        worker.close(20)
        assert worker.outcomes == {"served": 1, "refused": 0, "cancelled": 1, "failed": 0}

    with Endless(engine):
        asyncio.run(scenario())


def test_shutdown_stops_what_is_not_done_in_time(engine: Any) -> None:
    async def scenario() -> None:
        worker = RequestWorker(Pipeline(engine), max_queue=1)
        running = worker.submit(LONG)
        await first_piece(running)
        waiting = worker.submit(SHORT)
        await asyncio.to_thread(worker.close, 0.01)
        with pytest.raises(RefusedError, match="shutting down"):
            await waiting.answer()
        with pytest.raises(ClientGoneError):
            await running.answer()
        with pytest.raises(RefusedError, match="shutting down"):
            worker.submit(SHORT)

    with Endless(engine):
        asyncio.run(scenario())


def test_a_temperature_near_zero_is_greedy(engine: Any) -> None:
    with TestClient(create_app(ServerSettings(), engine)) as client:
        body = {"prompt": SHORT.prompt, "max_new_tokens": 2}
        texts = {client.post("/v1/generate", json={**body, "temperature": t}).json()["text"] for t in (0, 1e-45, 1e-5)}
    assert len(texts) == 1


def test_429_with_retry_after(engine: Any) -> None:
    settings = ServerSettings(max_queue=1)

    async def scenario() -> None:
        app = create_app(settings, engine)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=None) as client:
                body = {"prompt": LONG.prompt, "max_new_tokens": 200, "temperature": 0}
                answers = await asyncio.gather(*(client.post("/v1/generate", json=body) for _ in range(8)))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses[0] == 200
        assert statuses[-1] == 429
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1"

    asyncio.run(scenario())


def test_a_client_that_is_gone_is_not_queued(engine: Any) -> None:
    async def scenario() -> None:
        app = create_app(ServerSettings(), engine)
        async with app.router.lifespan_context(app):
            service = app.state.service
            with pytest.raises(ClientGoneError):
                await service.answer(Mock(is_disconnected=AsyncMock(return_value=True)), SHORT)
            assert not any(service.worker.outcomes.values())

    asyncio.run(scenario())


def test_a_client_that_leaves_before_the_first_event_stops_its_job() -> None:
    async def events() -> AsyncIterator[str]:
        yield ""

    async def send(_: Any) -> None:
        raise OSError("it left")

    job = Mock()
    scope: Any = {"type": "http", "asgi": {"spec_version": "2.4"}}
    with pytest.raises(ClientDisconnect):
        asyncio.run(EventStream(job, events())(scope, AsyncMock(), send))
    job.cancel.assert_called_once()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/generate"])
def test_a_client_that_leaves_the_queue_frees_its_place_while_another_request_runs(
    engine: Any, path: str, stream: bool
) -> None:
    long = {"prompt": LONG.prompt, "max_tokens": 900, "temperature": 0, "stream": True}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    if path != "/v1/generate":
        body["stream"] = stream
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    with Endless(engine), Running(ServerSettings(max_queue=1), engine) as running:
        worker = running.app.state.service.worker
        with running.http.stream("POST", "/v1/completions", json=long) as answer:
            lines = answer.iter_lines()
            next(lines)  # the engine is in the middle of it
            with running.connect(head.encode() + raw):
                until(lambda: worker.waiting == 1)
            until(lambda: worker.waiting == 0)
            assert (worker.outcomes["served"], worker.outcomes["cancelled"]) == (0, 1)
        until(lambda: worker.outcomes["cancelled"] == 2)


def test_shutdown_finishes_the_saves(engine: Any, tmp_path: Any) -> None:
    settings = ServerSettings(cache_dir=str(tmp_path / "cache"))
    body = {"prompt": "ann lives in paris. bob lives in rome.", "max_new_tokens": 2, "temperature": 0}
    with TestClient(create_app(settings, engine)) as client:
        first = client.post("/v1/generate", json=body).json()
    with TestClient(create_app(settings, engine)) as client:
        second = client.post("/v1/generate", json=body).json()
    assert (second["reuse"], second["text"]) == ("exact", first["text"])
