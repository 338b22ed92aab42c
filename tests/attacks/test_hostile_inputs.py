"""Hostile requests are refused, and the server goes on as before.

Bodies, pictures, headers and connections of the same kind, and requests made from the OpenAPI document, are in `tests/security`.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.attacks.material import any_prompt

from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings

COMPLETE, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/v1/generate"
LONG = "the home of ann is in rome . " * 20_000
VALUES: list[tuple[str, Any]] = [
    ("max_tokens", -1), ("max_tokens", 10**30), ("temperature", -1), ("temperature", "hot"), ("top_p", 0), ("n", 100),
    ("seed", -(10**30)), ("stop", ["a"] * 100), ("stop", 5), ("dejakv", {"reuse": "always"}), ("dejakv", {"threshold": 2}),
    ("dejakv", {"partition": "other"}), ("dejakv", {"order": "free", "parts": ["not there"]}), ("model", "../../etc/passwd"),
    ("prompt", "   "), ("prompt", ["x"] * 1000), ("prompt", LONG),
]  # fmt: skip
REQUESTS: list[tuple[str, str, bytes]] = [
    *(("POST", COMPLETE, json.dumps({"prompt": "x", name: value}).encode()) for name, value in VALUES),
    ("POST", COMPLETE, b'{"prompt":"x","temperature":NaN}'),
    ("POST", COMPLETE, b'{"prompt":"x","temperature":1e999999}'),
    ("POST", COMPLETE, '{"prompt":"x"}'.encode("utf-16")),
    ("POST", COMPLETE, b"\x80\x04cposix\nsystem\n."),
    ("POST", CHAT, json.dumps({"messages": [{"role": "user", "content": LONG}]}).encode()),
    ("POST", CHAT, json.dumps({"messages": [{"role": "user", "content": ""}] * 5000}).encode()),
    ("POST", GENERATE, json.dumps({"prompt": LONG}).encode()),
    ("POST", GENERATE, json.dumps({"prompt": "x", "store_key": "a" * 100_000}).encode()),
    ("GET", f"/{'a' * 60_000}", b""),
    ("GET", "/docs/%2e%2e/%2e%2e/%2e%2e/etc/passwd", b""),
    ("POST", "/v1/admin", b"{}"),
    ("DELETE", COMPLETE, b""),
]


@pytest.fixture(scope="module")
def client(docs_engine: Any) -> Iterator[TestClient]:
    with TestClient(create_app(ServerSettings(api_keys="alpha,beta"), docs_engine)) as client:
        yield client


def status(client: TestClient, method: str, path: str, body: bytes) -> int:
    headers = {"content-type": "application/json", "authorization": "Bearer alpha"}
    return client.request(method, path, content=body, headers=headers).status_code


def answer(client: TestClient, prompt: str) -> Any:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "dejakv": {"no_store": True}}
    reply = client.post(COMPLETE, json=body, headers={"authorization": "Bearer alpha"})
    return reply.json()["choices"][0]["text"]


def test_they_are_refused_and_a_prompt_is_answered_as_before(client: TestClient) -> None:
    prompt = any_prompt(random.Random("inputs"))
    before = answer(client, prompt)
    for method, path, body in REQUESTS:
        assert 400 <= status(client, method, path, body) < 500, (method, path[:80], body[:80])
    assert answer(client, prompt) == before


def test_a_request_without_fault_is_served(client: TestClient) -> None:
    """The check above can fail."""
    assert status(client, "POST", COMPLETE, b'{"prompt":"x","max_tokens":1}') == 200
