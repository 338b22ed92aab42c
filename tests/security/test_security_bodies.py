"""Hostile bodies: counted before anything is built from them, refused with the limit's name, and never a reason for a 5xx."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import rounds
from tests.serving import Running

from dejakv.http.bodies import check_values
from dejakv.http.errors import RefusedError
from dejakv.server.settings import ServerSettings

GENERATE, COMPLETE, CHAT = "/v1/generate", "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=6),
    max_leaves=40,
)


@pytest.fixture(scope="module")
def server(docs_engine: Any) -> Iterator[Running]:
    with Running(ServerSettings(max_new_tokens=16, max_body_bytes=8 * 1024**2), docs_engine) as running:
        yield running
        assert running.lag < 2, "the event loop was kept from its work"


def post(server: Running, path: str, body: bytes) -> httpx.Response:
    return server.http.post(path, content=body, headers=JSON)


def refusal(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["param"] or "") <= 300
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 1000
    return error["message"]


def values_in(value: Any) -> int:
    """What is to be counted, from the parsed value."""
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(0, len(value) - 1) + sum(map(values_in, inner))


def accepted(raw: bytes, most: int) -> bool:
    try:
        check_values(raw, most)
    except RefusedError:
        return False
    return True


@rounds(200)
@given(VALUES, st.booleans())
def test_values_are_counted_as_the_parser_would(value: Any, escaped: bool) -> None:
    raw = json.dumps(value, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    values = values_in(value)
    assert accepted(raw, values)
    if values:
        assert not accepted(raw, values - 1)


@pytest.mark.parametrize("piece", [b"[],", b"[", b'"",', b'""', b'{"a":', b"1,", b'"\\""'])
def test_what_is_no_json_is_counted_too(piece: bytes) -> None:
    assert not accepted(piece * 50_000, 1000)


PART = b'{"type":"text","text":"a"},'
FILLERS: dict[str, tuple[bytes, bytes, bytes, int, str]] = {
    "parts of no known type": (b'{"messages":[{"role":"user","content":[', b'{"type":1},', b"1]}]}", 413, "values"),
    "parts": (b'{"messages":[{"role":"user","content":[', PART, PART[:-1] + b"]}]}", 413, "values"),
    "messages": (b'{"messages":[', b'{"role":"user","content":"x"},', b"1]}", 413, "values"),
    "lists": (b"[", b"[],", b"[]]", 413, "values"),
    "fields": (b"{", b'"a":0,', b'"b":0}', 413, "values"),
    "strings without commas": (b"[", b'""', b"]", 413, "values"),
    "depth": (b'{"messages":', b"[", b"", 413, "values"),
    "tools": (b'{"messages":[],"tools":', b'[{"a":', b"", 413, "values"),
    "digits": (b'{"seed":', b"9", b"}", 400, "not valid JSON"),
    "escapes": (b'{"messages":[{"role":"user","content":"', b"\\n", b'"}]}', 400, "no text"),
    "text": (b'{"messages":[{"role":"user","content":"', b"word ", b'"}]}', 400, "context"),
    "a role": (b'{"messages":[{"content":"x","role":"', b"a", b'"}]}', 400, "role"),
    "a name of a field": (
        b'{"messages":[{"role":"user","content":[{"type":"text","',
        b"a",
        b'":1}]}]}',
        400,
        "not supported",
    ),
    "a stop sequence": (b'{"messages":[{"role":"user","content":"x"}],"stop":"', b"a", b'"}', 400, "stop"),
    "a model": (b'{"messages":[{"role":"user","content":"x"}],"model":"', b"a", b'"}', 404, "docs-lm"),
    "a picture": (
        b'{"messages":[{"role":"user","content":[{"type":"text","text":"x"},{"type":"image_url","image_url":{"url":'
        b'"data:image/png;base64,',
        b"AAAA",
        b'"}}]}]}',
        400,
        "not a readable image",
    ),
    "blanks": (b"", b" ", b"", 400, "not valid JSON"),
}


@pytest.mark.parametrize("name", FILLERS)
def test_seven_megabytes_of(server: Running, name: str) -> None:
    head, piece, end, status, says = FILLERS[name]
    answer = post(server, CHAT, head + piece * (7 * 1024**2 // len(piece)) + end)
    assert answer.status_code == status, answer.text[:500]
    assert says in refusal(answer)


@pytest.mark.parametrize("path", [GENERATE, COMPLETE])
def test_the_other_endpoints_have_the_same_limits(server: Running, path: str) -> None:
    for body, says in (
        (b'{"prompt":' + b"[" * 300, "nested lists and objects"),
        (b'{"prompt":[' + b"1," * 30_000, "values"),
        (b'{"prompt":"' + b"a" * 9 * 1024**2 + b'"}', "8388608 bytes"),
    ):
        answer = post(server, path, body)
        assert answer.status_code == 413
        assert says in refusal(answer)


SURROGATE = '"a \\ud800 b"'
FIELDS = [
    (CHAT, '{"messages":[{"role":"user","content":%s}]}'),
    (CHAT, '{"messages":[{"role":"user","content":"x"}],"metadata":{"user":%s}}'),
    (COMPLETE, '{"prompt":"x",%s:1}'),
    (GENERATE, '{"prompt":"x","store_key":%s}'),
]


@pytest.mark.parametrize(("path", "body"), FIELDS)
def test_half_of_a_surrogate_pair_is_a_clients_mistake_in_any_string(server: Running, path: str, body: str) -> None:
    for text in (SURROGATE.encode(), b'"a \xed\xa0\x80 b"', b'"\xff"'):
        answer = post(server, path, body.encode() % text)
        assert answer.status_code == 400
        assert "surrogates in pairs" in refusal(answer)
    emoji = post(server, path, body.encode() % b'"\\ud83d\\ude00"')
    assert "surrogate" not in emoji.text


@rounds(60)
@given(path=st.sampled_from([GENERATE, COMPLETE, CHAT]), body=st.binary(max_size=200))
def test_any_bytes(server: Running, path: str, body: bytes) -> None:
    assert 400 <= post(server, path, body).status_code < 500


@rounds(60)
@given(
    path=st.sampled_from([GENERATE, COMPLETE, CHAT]), fields=st.dictionaries(st.text(max_size=8), VALUES, max_size=4)
)
def test_any_json_beside_and_in_place_of_the_fields(server: Running, path: str, fields: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    limit = "max_new_tokens" if path == GENERATE else "max_tokens"
    for body in ({**plain, limit: 1, **fields}, {name: value for name in plain for value in fields.values()}):
        assert post(server, path, json.dumps(body).encode()).status_code < 500


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 415),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({**JSON, "Content-Encoding": "gzip"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_a_body_says_that_it_is_json(server: Running, headers: dict[str, str], status: int) -> None:
    """A page in a browser can send the other types to a server on the same machine without being asked."""
    body = b'{"prompt":"ann lives in","max_tokens":1}'
    assert server.http.post(COMPLETE, content=body, headers=headers).status_code == status
