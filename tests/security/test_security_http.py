"""The server's front: who is let in, and what one tenant learns of another."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import rounds
from tests.serving import Running

from dejakv.errors import ConfigError
from dejakv.server.access import OPEN
from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings

COMPLETE = "/v1/completions"
PATHS = [
    "/v1/generate",
    COMPLETE,
    "/v1/chat/completions",
    "/v1/cache/clear",
    "/v1/cache/stats",
    "/v1/models",
    "/metrics",
]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def app(docs_engine: Any) -> Any:
    return create_app(ServerSettings(api_keys="alpha,beta", operator_key="boss"), docs_engine)


def through_gate(app: Any, path: str, headers: list[tuple[bytes, bytes]], **more: Any) -> tuple[int, bytes]:
    """Status and body of a request of which nobody may ask for the body."""
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body was asked for")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", **more}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], sent[1]["body"]


@pytest.mark.parametrize("path", [*PATHS, "/v1/chat/completions/", "//v1/completions", "/v1/responses", "/healthy"])
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"Bearer zzz")],
        [(b"authorization", b"Basic alpha")],
        [(b"authorization", b"Bearer alpha\xe9")],
        [(b"authorization", b"Bearer alpha"), (b"authorization", b"Bearer beta")],
        [(b"x-api-key", b"alpha")],
    ],
)
@pytest.mark.parametrize("root", ["", "/api"])
def test_without_a_known_key_no_body_is_asked_for(app: Any, path: str, headers: Any, root: str) -> None:
    status, body = through_gate(app, root + path, headers, root_path=root)
    assert status == 401
    assert json.loads(body)["error"]["message"].startswith("missing or unknown API key")


def test_open_paths_say_nothing_of_anybody(docs_engine: Any) -> None:
    with TestClient(create_app(ServerSettings(api_keys="alpha"), docs_engine)) as client:
        before = {path: client.get(path).text for path in OPEN}
        body = {"prompt": "ann lives in", "max_tokens": 1}
        assert client.post(COMPLETE, json=body, headers=bearer("alpha")).status_code == 200
        assert {path: client.get(path).text for path in OPEN} == before


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"api_keys": " , "}, "holds no key"),
        ({"api_keys": "alpha", "operator_key": "alpha"}, "one of the API keys"),
        ({"api_keys": "alpha", "operator_key": "a b"}, "cannot be sent in a header"),
        ({"operator_key": "boss"}, "protects nothing"),
    ],
)
def test_keys_that_would_not_protect_are_an_error_at_start(docs_engine: Any, settings: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        create_app(ServerSettings(**settings), docs_engine)


NAMES = st.sampled_from(["partition", "cache_salt", "tenant", "user", "api_key", "key", "authorization", "caller"])


@pytest.fixture(scope="module")
def tenants(app: Any) -> Iterator[TestClient]:
    with TestClient(app) as client:
        yield client


@rounds(20)
@given(fields=st.dictionaries(NAMES, st.sampled_from(["alpha", "key-alpha", "default", None, 1, ["alpha"]])), key=NAMES)
def test_nothing_but_the_key_says_whose_partition_it_is(tenants: TestClient, fields: Any, key: str) -> None:
    prompt = f"ann lives in paris . bob is {sorted(map(str, fields.items()))} ."
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    tenants.post(COMPLETE, json=body, headers=bearer("alpha"))
    tenants.app.state.service.worker.pipeline.cache.flush()  # type: ignore[attr-defined]
    before = tenants.get("/v1/cache/stats", headers=bearer("alpha")).json()
    theirs = tenants.post(
        f"{COMPLETE}?{key}=alpha", json={**body, "metadata": fields}, headers={**bearer("beta"), key: "alpha"}
        if key != "authorization" else bearer("beta"),
    )  # fmt: skip
    assert theirs.status_code == 200
    tenants.app.state.service.worker.pipeline.cache.flush()  # type: ignore[attr-defined]
    named = tenants.post(COMPLETE, json={**body, **fields}, headers=bearer("beta"))
    known = {name for name, value in fields.items() if name == "user" or value is None}  # null: left out
    assert named.status_code == (200 if known == fields.keys() else 400), (
        "a field in the body that would name one is refused"
    )
    again = tenants.post(COMPLETE, json=body, headers=bearer("beta"))
    assert again.json()["dejakv"]["tokens_reused"] > theirs.json()["dejakv"]["tokens_reused"]
    assert tenants.get("/v1/cache/stats", headers=bearer("alpha")).json() == before
    tenants.post("/v1/cache/clear", headers=bearer("alpha"))
    tenants.post("/v1/cache/clear", headers=bearer("beta"))


def test_a_port_in_use_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "dejakv.cli.main", "serve", "--port", str(port), "--model", "no-such-model"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "--port" in done.stderr


@pytest.mark.parametrize("key", [None, "alpha"])
def test_schemathesis_finds_no_server_error(docs_engine: Any, key: str | None) -> None:
    """Requests made from the server's own OpenAPI document, fitting and unfitting ones; both faces, with and without keys."""
    import schemathesis

    keys: dict[str, Any] = {} if key is None else {"api_keys": "alpha,beta", "operator_key": "boss"}
    ran = 0
    with Running(ServerSettings(max_new_tokens=16, **keys), docs_engine) as running:
        schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
        for operation in (found.ok() for found in schema.get_all_operations()):
            unfitting = [schemathesis.GenerationMode.NEGATIVE] if operation.body else []  # nothing else can be wrong
            for mode in [schemathesis.GenerationMode.POSITIVE, *unfitting]:
                strategy = operation.as_strategy(generation_mode=mode)
                ran += exercise(strategy, bearer(key) if key is not None else {})
        assert running.lag < 2, "the event loop was kept from its work"
    assert ran > 60


def exercise(strategy: Any, headers: dict[str, str]) -> int:
    """How many requests were sent."""
    ran = 0

    @rounds(12)
    @given(case=strategy)
    def run(case: Any) -> None:
        nonlocal ran
        ran += 1
        answer = case.call(headers=headers, timeout=None)
        assert answer.status_code < 500, (case.method, case.path, answer.text)

    run()
    return ran
