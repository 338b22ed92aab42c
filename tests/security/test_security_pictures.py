"""Hostile pictures over HTTP: refused before they are decoded, and not decoded for a client that left."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ImageFile
from tests.conftest import rounds
from tests.picture_files import GOOD, HARMFUL, data_url, png
from tests.serving import Running, until

from dejakv.config import SemanticCacheConfig
from dejakv.engines.open import ModelChoice, open_engine
from dejakv.engines.transformers import prompts as engine_pictures
from dejakv.http.errors import ClientGoneError
from dejakv.pictures import decode_picture
from dejakv.pipeline import Pipeline
from dejakv.request import Media, Request, Sampling
from dejakv.server.jobs import RequestWorker
from dejakv.server.settings import ServerSettings

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def engine() -> Any:
    return open_engine(ModelChoice("shapes-vlm", dtype="fp32"), SemanticCacheConfig())


@pytest.fixture(scope="module")
def server(engine: Any) -> Iterator[Running]:
    settings = ServerSettings(model="shapes-vlm", max_pictures=4, max_request_pixels=1_000_000)
    with Running(settings, engine) as running:
        yield running
        assert running.lag < 2, "the event loop was kept from its work"


def body(*urls: str) -> dict[str, Any]:
    parts: list[Any] = [{"type": "text", "text": "what color is the circle?"}]
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, "temperature": 0}


def refusal(server: Running, *urls: str) -> str:
    with patch.object(ImageFile.ImageFile, "load", side_effect=AssertionError("decoded")):
        answer = server.http.post(CHAT, json=body(*urls))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    return answer.json()["error"]["message"]


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_files(server: Running, name: str) -> None:
    data, says = HARMFUL[name]
    assert says in refusal(server, data_url(data))
    assert server.http.post(CHAT, json=body(data_url(GOOD))).status_code == 200


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/a.png",
        "file:///etc/passwd",
        "ftp://127.0.0.1/a.png",
        "/etc/passwd",
        "data:image/png,abc",
        "data:text/html;base64,AAAA",
        "data:image/png;base64,@@@@",
        "data:image/png;base64,\u00e9",
        "data:image/svg+xml;base64,PHN2Zy8+",
        "",
    ],
)
def test_other_urls(server: Running, url: str) -> None:
    says = refusal(server, url)
    assert "data URLs" in says or "base64" in says or "readable" in says


@pytest.mark.parametrize("address", ["data:text/html;base64", "data:image/png", "http://127.0.0.1:1/a.png"])
def test_a_good_picture_under_another_address(server: Running, address: str) -> None:
    assert "data URLs" in refusal(server, data_url(GOOD).replace("data:image/png;base64", address))


def test_the_work_of_a_request_is_bounded(server: Running) -> None:
    assert "DEJAKV_MAX_PICTURES" in refusal(server, *[data_url(GOOD)] * 5)
    large = [data_url(png(800, 400 + number)) for number in range(4)]
    assert "DEJAKV_MAX_REQUEST_PIXELS" in refusal(server, *large)
    assert server.http.post(CHAT, json=body(*large[:2])).status_code in (
        200,
        400,
    )  # 400: longer than this model's context


@rounds(30)
@given(st.data())
def test_damaged_files(server: Running, data: st.DataObject) -> None:
    whole = bytearray(png(40, 30))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    del whole[data.draw(st.integers(1, len(whole))) :]
    assert server.http.post(CHAT, json=body(data_url(bytes(whole)))).status_code in (200, 400)


def test_nothing_is_decoded_for_a_client_that_left(engine: Any) -> None:
    """It leaves while the first of three pictures is decoded: the others never are."""
    seen: list[Media] = []

    async def scenario() -> None:
        worker = RequestWorker(Pipeline(engine), max_queue=4)
        media = tuple(Media(png(30 + number, 30)) for number in range(3))
        prompt = f"{engine.vision.book.image_token * 3} what color is the circle?"

        def counted(item: Media) -> Any:
            picture = decode_picture(item)
            seen.append(item)
            job.cancel()
            return picture

        with patch.object(engine_pictures, "decode_picture", counted):
            job = worker.submit(Request("left", prompt, prompt, media, "x", sampling=Sampling(1)))
            with pytest.raises(ClientGoneError):
                await job.answer()
        worker.close(20)
        assert worker.outcomes["cancelled"] == 1

    asyncio.run(scenario())
    assert len(seen) == 1


def test_a_client_that_left_before_its_pictures_were_judged_is_not_queued(server: Running) -> None:
    worker = server.app.state.service.worker
    before = worker.outcomes
    raw = json.dumps(body(*[data_url(png(900, 270))] * 4)).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    connection = server.connect()
    with patch("dejakv.server.chat_prompt.picture_of", side_effect=lambda *_: (connection.close(), 0)) as judged:
        connection.sendall(head % len(raw) + raw)
        until(lambda: judged.call_count and not server.server.server_state.connections)
    assert judged.call_count < 4
    assert worker.outcomes == before
