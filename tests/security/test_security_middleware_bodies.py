"""What vLLM's middleware lets through of a body, and as whose."""

import asyncio
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.security.probes import CHAT, MANY, PATHS, app_of, bearer, posted, send_to

from dejakv.adopt.openai_body import restrict_to_partition
from dejakv.http.bodies import BodyLimits


@pytest.mark.parametrize(
    ("raw", "status", "words"),
    [
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", 413, b"nested"),
        (b"[" * 100_000, 413, b"nested"),
        (b'{"a":' * 201 + b"1" + b"}" * 201, 413, b"nested"),
        (b'{"a":[' + b"[]," * 1_000_000 + b"[]]}", 413, b"values"),
        (b'{"a":"\xff"}', 400, b"UTF-8"),
        ('{"a":1}'.encode("utf-16"), 400, b"UTF-8"),
        (b'{"a":NaN}', 400, b"JSON"),
        (b'{"a":-Infinity}', 400, b"JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", 400, b"JSON"),
        (b'{"a":"\\ud800"}', 400, b"surrogates in pairs"),
        (b"{not json", 400, b"JSON"),
        (b"[1]", 400, b"no JSON object"),
        (b"", 400, b"JSON"),
    ],
)
def test_bodies_that_are_refused(raw, status, words):
    app, upstream = app_of()
    found, answer, _ = send_to(app, CHAT, headers=bearer(b"alpha"), chunks=(raw,))
    assert (found, words in answer) == (status, True), answer
    assert not upstream.reached


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b"content-encoding", b"gzip")], 415),
        ([(b"content-encoding", b"identity")], 200),
        ([(b"content-type", b"text/plain")], 415),
        ([(b"content-type", b"application/json; charset=utf-8")], 200),
        ([(b"content-type", b"application/json"), (b"content-type", b"text/plain")], 400),
        ([(b"content-length", b"10000000000")], 413),
        ([(b"content-length", b"-1")], 400),
        ([(b"content-length", b"\xb2")], 400),
        ([(b"transfer-encoding", b"chunked")], 200),
        ([(b"transfer-encoding", b"chunked"), (b"content-length", b"2")], 400),
    ],
)
def test_headers_of_bodies(headers, status):
    app, upstream = app_of()
    found, _, read = send_to(app, CHAT, headers=[*bearer(b"alpha"), *headers])
    assert found == status
    assert read == (1 if status == 200 else 0)
    if upstream.reached:
        inner = upstream.reached[0][0]["headers"]
        assert [value for name, value in inner if name == b"content-type"] == [b"application/json"]
        assert not [name for name, _ in inner if name == b"transfer-encoding"]


def test_a_body_that_grows_too_long_or_does_not_come():
    app, upstream = app_of(limits=BodyLimits(max_bytes=100, seconds=0.05))
    status, _, read = send_to(app, CHAT, headers=bearer(b"alpha"), chunks=[b" " * 60] * 50)
    assert (status, read) == (413, 2)
    sent = []

    async def receive():
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    headers = [*bearer(b"alpha"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 408
    assert send_to(app, CHAT, headers=bearer(b"alpha"), chunks=())[0] == 499
    assert not upstream.reached


FORGED = "forged-by-the-client"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
CHOICES = st.fixed_dictionaries(
    {},
    optional={
        "cache_salt": st.just(FORGED),
        "multi_modal_uuids": st.just({"image": [FORGED]}),
        "kv_transfer_params": st.just({"remote_host": FORGED, "dejakv": {"mode": "exact"}}),
        "ec_transfer_params": st.just({"remote": FORGED}),
        "vllm_xargs": st.just({"kv_transfer_params": {"remote_host": FORGED}, "cache_salt": FORGED}),
        "sampling_params": st.just({"extra_args": {"kv_transfer_params": {"remote_host": FORGED}}}),
        "features": st.just({"mm_hashes": {"image": [FORGED]}}),
    },
)
PART = st.builds(
    lambda choices, text: {**choices, "type": "image_url", "image_url": {"url": text}, "uuid": FORGED},
    CHOICES,
    st.text(max_size=8),
)
CONTENT = st.recursive(
    st.lists(PART, max_size=3),
    lambda inner: st.lists(st.builds(lambda c: {"type": "tool_result", "content": c}, inner), max_size=2),
)
MESSAGE = st.builds(lambda choices, content: {**choices, "role": "user", "content": content}, CHOICES, CONTENT)
MESSAGES = st.lists(MESSAGE, max_size=3) | st.lists(st.lists(MESSAGE, max_size=2), max_size=2)
BODY = st.builds(
    lambda choices, name, messages, more: {**more, **choices, name: messages},
    CHOICES,
    st.sampled_from(["messages", "input", "content_parts"]),
    MESSAGES,
    st.dictionaries(st.text(max_size=8), JSON, max_size=3),
)


@MANY
@given(BODY, st.sampled_from(PATHS))
def test_nothing_that_a_client_chose_names_a_partition_or_a_medium(body, path):
    mine, other = posted(body, "alpha", path), posted(body, "beta", path)
    if mine is None or other is None:
        assert mine is other
        return
    assert FORGED not in json.dumps(mine)
    assert mine["cache_salt"] != other["cache_salt"]
    if "features" in body:
        assert mine["features"] != other["features"]


@MANY
@given(st.binary(max_size=80) | JSON.map(json.dumps).map(str.encode))
@example(b'{"cache_salt":"a","messages":[],"cache_salt":"forged-by-the-client"}')
@example(b'{"cache\\u005fsalt":"forged-by-the-client"}')
@example(b'{"kv_transfer_params":{"dejakv":{"mode":["adopt"]}},"prompt":"x"}')
@example(b'{"kv_transfer_params":{"dejakv":{"mode":"adopt","\\u00e9":1}},"prompt":"x"}')
def test_any_bytes_are_answered(raw):
    body = posted(raw)
    if body is not None:
        assert body["cache_salt"].startswith("key-")
        assert FORGED not in json.dumps(body)


@MANY
@given(JSON)
def test_what_shapes_a_prompt_is_left_alone(value):
    """Tools, their arguments and every field that is not known keep what a client wrote, names such as `uuid` included."""
    tools = [{"type": "function", "function": {"parameters": {"properties": {"uuid": value, "cache_salt": value}}}}]
    call = {"type": "tool_use", "input": {"uuid": value, "content": value}}
    body = {"tools": tools, "messages": [{"role": "assistant", "content": [call]}], "metadata": {"uuid": value}}
    before = json.loads(json.dumps(body))
    restrict_to_partition(body, "p")
    assert body == {**before, "cache_salt": "p"}


def test_answers_of_others_are_not_continued():
    app, upstream = app_of()
    status, answer, _ = send_to(
        app, "/v1/responses", headers=bearer(b"alpha"), chunks=(b'{"previous_response_id": "resp_1"}',)
    )
    assert status == 400
    assert b"send the conversation itself" in answer
    assert not upstream.reached
