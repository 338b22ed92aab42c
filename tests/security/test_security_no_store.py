"""A request that asks for it leaves nothing behind, in memory or on disk: everything that the server holds is looked through."""

import base64
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from tests.documents import COSTS
from tests.security.probes import Trace, frames_of, remains
from tests.serving import stored, until

from dejakv.config import SemanticCacheConfig
from dejakv.encoder_cache import VisualKVCache
from dejakv.engines.open import ModelChoice, open_engine
from dejakv.request import Retention, retention_scope
from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings
from dejakv_models.docs import make_document, prompt_of
from dejakv_models.shapes import ShapesDataset

SECRET = "xqzj wvkp tlmr bdfg hnsc"
DOCUMENT = make_document(random.Random(21), facts=20).text
PROMPT = prompt_of(f"{SECRET} {DOCUMENT}", "Where does ann live?")
NO_STORE = {"Cache-Control": "no-cache, No-Store"}
COMPLETION: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "temperature": 0}
GENERATE: dict[str, Any] = {"prompt": PROMPT, "max_new_tokens": 4, "temperature": 0}
ASKED = [
    ("/v1/generate", {**GENERATE, "no_store": True}, {}),
    ("/v1/generate", {**GENERATE, "store_key": "xqzj"}, NO_STORE),
    ("/v1/completions", {**COMPLETION, "dejakv": {"no_store": True}}, {}),
    ("/v1/completions", COMPLETION, NO_STORE),
    ("/v1/completions", {**COMPLETION, "stream": True}, NO_STORE),
    ("/v1/chat/completions", {**CHAT, "dejakv": {"no_store": True}}, {}),
    ("/v1/chat/completions", CHAT, NO_STORE),
    ("/v1/chat/completions", {**CHAT, "stream": True}, NO_STORE),
]


@contextmanager
def serving(engine: Any, **settings: Any) -> Iterator[TestClient]:
    given = {"max_new_tokens": 64, "costs": COSTS, "promote_after": 3600.0, **settings}
    with TestClient(create_app(ServerSettings(**given), engine)) as client:
        yield client


def held(client: TestClient) -> list[object]:
    stored(client)
    service = client.app.state.service  # type: ignore[attr-defined]
    until(lambda: service.worker._running is None)
    return [service, *frames_of(["dejakv-engine", "dejakv-writer"])]


def trace_of(engine: Any) -> Trace:
    return Trace((SECRET, "xqzj"), tokens(engine))


def tokens(engine: Any) -> tuple[int, ...]:
    """Token ids in the middle of the secret, which no border touches."""
    return tuple(engine.tokenizer(SECRET, add_special_tokens=False)["input_ids"][2:-2])


def bytes_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(("path", "body", "headers"), ASKED)
@pytest.mark.parametrize("reuse", ["exact", "blend"])
def test_nothing_of_the_request_is_held(
    docs_engine: Any, tmp_path: Path, path: str, body: Any, headers: Any, reuse: Any
) -> None:
    with serving(docs_engine, cache_dir=str(tmp_path), reuse=reuse) as client:
        if reuse == "blend":  # a donor, so that rows would be kept and the prompt would wait to be promoted
            client.post("/v1/completions", json={**COMPLETION, "prompt": prompt_of(DOCUMENT, "Where does bob live?")})
            stored(client)
            if "dejakv" in body or path != "/v1/generate":
                body = {**body, "dejakv": {**body.get("dejakv", {}), "reuse": "blend"}}
        answer = client.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert remains(held(client), trace_of(docs_engine)) == []
        ids = np.array(tokens(docs_engine), dtype="<u4").tobytes()
        assert ids not in bytes_in(tmp_path)
        assert b"xqzj" not in bytes_in(tmp_path)


def test_the_check_sees_what_is_held(docs_engine: Any, tmp_path: Path) -> None:
    with serving(docs_engine, cache_dir=str(tmp_path)) as client:
        assert client.post("/v1/completions", json=COMPLETION).status_code == 200
        stored(client)
        assert np.array(tokens(docs_engine), dtype="<u4").tobytes() in bytes_in(tmp_path)
    with serving(docs_engine, reuse="blend") as client:
        client.post("/v1/completions", json={**COMPLETION, "prompt": prompt_of(DOCUMENT, "Where does bob live?")})
        stored(client)
        answer = client.post("/v1/completions", json={**COMPLETION, "dejakv": {"reuse": "blend"}}).json()
        assert answer["dejakv"]["reuse"] == "blend", answer["dejakv"]
        assert remains(held(client), trace_of(docs_engine)), "the prompt waits to be promoted"


def test_what_is_stored_serves_it_all_the_same(docs_engine: Any) -> None:
    with serving(docs_engine) as client:
        client.post("/v1/completions", json=COMPLETION)
        stored(client)
        answer = client.post("/v1/completions", json=COMPLETION, headers=NO_STORE).json()
        assert answer["dejakv"]["reuse"] == "exact"


@pytest.mark.parametrize("header", ["no-cache", "max-age=0", "no-storex", "x-no-store"])
def test_other_directives_keep_as_usual(docs_engine: Any, header: str) -> None:
    with serving(docs_engine) as client:
        client.post("/v1/completions", json=COMPLETION, headers={"Cache-Control": header})
        stored(client)
        assert client.get("/v1/cache/stats").json()["stored"] == 1


SAMPLE = next(sample for sample in ShapesDataset(seed=3, samples=8, images=1) if sample.answer)


@pytest.fixture(scope="module")
def shapes() -> Any:
    config = SemanticCacheConfig(embedding_layers=("vision:auto:0.9",), embedding_hook="vision", media="similar")
    return open_engine(ModelChoice("shapes-vlm", dtype="fp32"), config)


def test_nothing_of_a_picture_is_held(shapes: Any) -> None:
    picture = SAMPLE.media[0]
    url = "data:image/png;base64," + base64.b64encode(picture.data).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": SAMPLE.question}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 4}
    trace = Trace((picture.digest,), pixels=lambda found: isinstance(found, bytes) and picture.data in found)
    with serving(shapes, model="shapes-vlm") as client:
        first = client.post("/v1/chat/completions", json=body, headers=NO_STORE)
        again = client.post("/v1/chat/completions", json=body, headers=NO_STORE)
        assert again.json()["choices"] == first.json()["choices"]
        assert [answer.json()["dejakv"]["reuse"] for answer in (first, again)] == ["none", "none"]
        assert remains(held(client), trace) == []
        assert shapes.encoder_cache.stats().entries == 0
        kept = client.post("/v1/chat/completions", json=body)
        assert kept.json()["choices"] == first.json()["choices"]
        assert remains(held(client), trace)


def test_the_registry_keeps_no_output_of_such_a_request() -> None:
    cache = VisualKVCache()
    view, output = cache.view("e", "p"), np.ones((2, 3), np.float32)
    with retention_scope(Retention(no_store=True)):
        assert view.get_or_compute("a" * 64, "image", lambda: output) is not None
        assert view.store("b" * 64, "image", output) is None
    assert view.stats().entries == 0
    view.get_or_compute("a" * 64, "image", lambda: output)
    assert view.stats().entries == 1
    with retention_scope(Retention(no_store=True)):
        assert view.get_or_compute("a" * 64, "image", lambda: pytest.fail("it is there")) is not None
