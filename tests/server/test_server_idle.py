"""Idle time on the server: prompts are promoted one at a time, and a request goes before what still waits."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.documents import COSTS, DOCUMENT, EXACT, FACT, OTHER, request
from tests.serving import stored, until

from dejakv.build import build_cache
from dejakv.errors import InputError
from dejakv.pipeline import Pipeline
from dejakv.request import Request
from dejakv.server.app import create_app
from dejakv.server.jobs import RequestWorker
from dejakv.server.settings import ServerSettings
from dejakv_models.docs import ask

BLEND = replace(EXACT, reuse="blend", semantic_text=False)
MIXED = f"{OTHER.text} {DOCUMENT.text}"


def question(seed: int) -> str:
    return ask(FACT if seed else OTHER.facts[2], random.Random(seed))


class Told(Pipeline):
    """Tells in which order it served and promoted. `during` is called within the first promotion."""

    def __init__(self, engine: Any, cache: Any) -> None:
        super().__init__(engine, cache, promotes=True)
        self.order: list[str] = []
        self.during: Callable[[], None] = lambda: None

    def answer(self, request: Request, **named: Any) -> Any:
        self.order.append("answered")
        return super().answer(request, **named)

    def settle_one(self) -> bool:
        self.order.append("promoted")
        self.during()
        self.during = lambda: None
        return super().settle_one()


@pytest.fixture
def pipeline(engine: Any) -> Iterator[Told]:
    cache = build_cache(BLEND, engine, background=False)
    yield Told(engine, cache)
    cache.close()


def test_a_request_that_arrives_waits_for_one_promotion_at_most(pipeline: Told) -> None:
    pipeline.answer(request(question(0)))
    waiting = [request(question(seed), MIXED) for seed in (0, 1)]
    for wanted in waiting:
        assert pipeline.answer(wanted).record.method == "blend"
    pipeline.order.clear()

    async def scenario() -> None:
        loop, jobs, arrived = asyncio.get_running_loop(), [], asyncio.Event()

        def arrive() -> None:
            jobs.append(worker.submit(request("Who?", DOCUMENT.text)))
            arrived.set()

        def during() -> None:
            loop.call_soon_threadsafe(arrive)
            asyncio.run_coroutine_threadsafe(arrived.wait(), loop).result()

        pipeline.during = during
        worker = RequestWorker(pipeline, 4)
        await arrived.wait()
        await jobs[0].answer()
        await asyncio.to_thread(until, lambda: pipeline.cache.stats("default").promotions == 2)
        assert pipeline.order == ["promoted", "answered", "promoted"]
        for wanted in waiting:
            assert (await worker.submit(wanted).answer()).record.method == "exact"
        await asyncio.to_thread(worker.close, 20)

    asyncio.run(scenario())


def test_nothing_is_promoted_between_requests_that_follow_each_other(pipeline: Told) -> None:
    """Traffic has pauses: `promote_after` is the least that counts as idle time."""
    pipeline.answer(request(question(0)))
    pipeline.answer(request(question(0), MIXED))
    pipeline.order.clear()

    async def scenario() -> None:
        worker = RequestWorker(pipeline, 8, promote_after=60.0)
        for _ in range(2):
            await worker.submit(request(question(1), MIXED)).answer()
        await asyncio.to_thread(worker.close, 20)

    asyncio.run(scenario())
    assert pipeline.order == ["answered", "answered"]
    assert pipeline.cache.queue.counts.promotions == 2


def test_the_server_promotes_when_it_is_idle_and_says_so(engine: Any) -> None:
    settings = ServerSettings(reuse="blend", promote_after=0.0, max_new_tokens=64, costs=COSTS)
    with TestClient(create_app(settings, engine)) as client:
        prompts = [request(question(0)).prompt, request(question(0), MIXED).prompt]
        bodies = [{"prompt": prompt, "max_new_tokens": 2} for prompt in prompts]
        client.post("/v1/generate", json=bodies[0])
        stored(client)
        assert client.post("/v1/generate", json=bodies[1]).json()["reuse"] == "blend"
        until(lambda: "dejakv_promotions_total 1.0" in client.get("/metrics").text)
        assert client.post("/v1/generate", json=bodies[1]).json()["reuse"] == "exact"
        told = client.get("/metrics").text
        for line in ("dejakv_promotions_waiting 0.0", "dejakv_promotions_failed_total 0.0"):
            assert line in told


def test_a_server_may_be_told_not_to(engine: Any) -> None:
    settings = ServerSettings(reuse="blend", promote=False, max_new_tokens=64, costs=COSTS)
    with TestClient(create_app(settings, engine)) as client:
        for context in (DOCUMENT.text, MIXED):
            body = {"prompt": request(question(0), context).prompt, "max_new_tokens": 2}
            told = client.post("/v1/generate", json=body).json()
            stored(client)
        assert told["reuse"] == "blend"
        assert client.app.state.service.worker.pipeline.cache.queue.counts.promotions == 0


def test_the_turn_goes_round_among_tenants() -> None:
    """One tenant's many requests make another wait for no more than the one under way."""
    order: list[str] = []
    begun, go = threading.Event(), threading.Event()

    def answer(request: Request, **_: Any) -> Any:
        begun.set()
        assert go.wait(60)
        order.append(request.partition)
        raise InputError("not answered here")

    async def scenario() -> None:
        stub: Any = SimpleNamespace(answer=answer, waiting=0, cache=None, stop_settling=lambda: None)
        worker = RequestWorker(stub, 16)
        jobs = [worker.submit(Request("1", "p", "p", partition="many"))]
        assert await asyncio.to_thread(begun.wait, 60)
        later = ("many", "many", "many", "few", "few", "third")
        jobs += [worker.submit(Request("1", "p", "p", partition=partition)) for partition in later]
        jobs[1].cancel()
        go.set()
        for job in jobs[:1] + jobs[2:]:
            with pytest.raises(InputError):
                await job.answer()
        await asyncio.to_thread(worker.close, 20)

    asyncio.run(scenario())
    assert order == ["many", "few", "third", "many", "few", "many"]
