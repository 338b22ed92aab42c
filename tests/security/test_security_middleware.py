"""vLLM's middleware against hostile requests, with an application in vLLM's place that keeps whatever reaches it."""

import asyncio
import json
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette._utils import get_route_path
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from dejakv.engines.vllm.adopt import Adopter, Asked, Provenance
from dejakv.engines.vllm.bodies import Limits, Refused, parse_object, written
from dejakv.engines.vllm.middleware import AdoptMiddleware
from dejakv.engines.vllm.openai_body import own
from dejakv.engines.vllm.routes import CLIENT, EVERYBODY
from dejakv.errors import ConfigError

PATHS = sorted(CLIENT)
CHAT = "/v1/chat/completions"
MANY = settings(max_examples=150, deadline=None)


class _Nothing(Adopter):
    """Finds nothing: what is tested is who gets through, and with what."""

    def __init__(self) -> None:
        pass

    def find(self, asked: Asked) -> tuple[str, Provenance]:
        return asked.text, Provenance()

    def learn(self, asked: Asked, provenance: Provenance) -> None:
        pass


class _Upstream:
    def __init__(self):
        self.reached = []

    async def __call__(self, scope, receive, send):
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        self.reached.append((scope, body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def _app(keys=("alpha", "beta"), **more):
    upstream = _Upstream()
    return AdoptMiddleware(upstream, _Nothing(), keys, **more), upstream


def _send(app, path, *, method="POST", headers=(), root="", chunks=(b"{}",)):
    """Status and answer of one request, and how many parts of its body were read."""
    left, sent = list(chunks), []

    async def receive():
        if not left:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "root_path": root, "headers": list(headers)}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], sent[1]["body"], len(chunks) - len(left)


def _bearer(key):
    return [(b"authorization", b"Bearer " + key)]


def _post(body, key="alpha", path=CHAT):
    """What reaches vLLM of a body, None if it is refused."""
    app, upstream = _app()
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, _, _ = _send(app, path, headers=_bearer(key.encode()), chunks=(raw,))
    assert (status == 200) == bool(upstream.reached)
    assert status < 500
    return json.loads(upstream.reached[0][1]) if upstream.reached else None


SEGMENTS = st.sampled_from(
    ["v1", "chat", "completions", "responses", "batch", "messages", "inference", "generate", "tokenize", "health", "docs",
     "metrics", "api", "", ".", "..", "%2e%2e", "V1", "render", "invocations", "sleep", "realtime", "v1%2fmodels", "\u0456"]
)  # fmt: skip
PATH = st.one_of(
    st.lists(SEGMENTS, max_size=6).map(lambda parts: "/" + "/".join(parts)),
    st.sampled_from(PATHS).flatmap(lambda p: st.sampled_from([p, p + "/", "/" + p, p.upper(), p + "//", p + "/x", p + ";", p + "?"])),
    st.text(max_size=30).map(lambda text: "/" + text),
)  # fmt: skip
METHOD = st.sampled_from(
    ["POST", "GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "post", "QUERY"]
)
KEY = st.one_of(st.none(), st.binary(max_size=20), st.sampled_from([b"alph", b"alphaa", b"ALPHA", b"alpha beta", b""]))


@MANY
@given(PATH, METHOD, KEY, st.sampled_from(["", "/api", "/v1", "/"]), st.binary(max_size=40))
@example(CHAT, "POST", None, "/api", b"{}")
@example("/api" + CHAT, "POST", None, "/api", b"{}")
@example("/v1/chat/completions/batch", "POST", None, "", b"{}")
def test_nothing_without_a_key_reaches_the_model(path, method, key, root, body):
    app, upstream = _app()
    headers = [] if key is None else _bearer(key)
    status, _, read = _send(app, path, method=method, headers=headers, root=root, chunks=(body,))
    if upstream.reached:
        inner = get_route_path({"type": "http", "path": path, "root_path": root})
        assert (method, inner) in EVERYBODY or (method == "OPTIONS" and inner in CLIENT)
    else:
        assert status in (401, 403)
        assert read == 0, "the key is looked at before the body"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("root", ["", "/api", "/api/v2"])
def test_with_a_key_each_path_is_the_keys(path, root):
    for full in {path, root + path}:
        app, upstream = _app()
        body = json.dumps({"cache_salt": "forged"}).encode()
        for key in (b"alpha", b"beta"):
            status, _, _ = _send(app, full, headers=_bearer(key), root=root, chunks=(body[:5], body[5:]))
            assert status == 200
        salts = [json.loads(raw)["cache_salt"] for _, raw in upstream.reached]
        assert len(set(salts)) == 2
        assert "forged" not in salts


def test_percent_encoding_and_slashes_through_a_real_client():
    """As a server decodes paths, and with a root path of its own."""
    app, upstream = _app()
    for root in ("", "/api"):
        client = TestClient(app, root_path=root)
        for path in (
            CHAT,
            quote(CHAT, safe=""),
            CHAT.replace("chat", "%63hat"),
            CHAT + "/",
            "/" + CHAT,
            CHAT.replace("/", "//"),
        ):
            assert client.post(f"/{path.removeprefix('/')}", json={}).status_code in (401, 403)
            assert client.post(f"{root}/{path.removeprefix('/')}", json={}).status_code in (401, 403)
    assert not upstream.reached


def test_websockets_are_not_for_clients():
    app, upstream = _app()
    with pytest.raises(WebSocketDisconnect) as closed, TestClient(app).websocket_connect("/v1/realtime"):
        pass
    assert closed.value.code == 1008
    assert not upstream.reached


def test_the_operator_may_do_the_rest(monkeypatch):
    monkeypatch.setenv("DEJAKV_OPERATOR_KEY", "boss")
    app, upstream = _app()
    assert _send(app, "/sleep", headers=_bearer(b"boss"))[0] == 200
    assert _send(app, CHAT, headers=_bearer(b"boss"))[0] == 401
    status, answer, _ = _send(app, "/sleep", headers=_bearer(b"alpha"))
    assert status == 403
    assert b"DEJAKV_OPERATOR_KEY" in answer
    assert len(upstream.reached) == 1


def test_without_keys_every_route_is_open_and_bodies_have_one_partition():
    app, upstream = _app(keys=())
    assert _send(app, "/sleep")[0] == 200
    assert _send(app, CHAT, chunks=(b'{"cache_salt": "forged"}',))[0] == 200
    assert json.loads(upstream.reached[1][1])["cache_salt"] == "default"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b"x-api-key", b"alpha")], 200),
        ([(b"Authorization", b"bearer  alpha")], 200),
        ([(b"x-api-key", b"alpha"), (b"authorization", b"Bearer alpha")], 401),
        ([(b"authorization", b"Bearer no"), (b"authorization", b"Bearer alpha")], 400),
        ([(b"authorization", b"Basic alpha")], 401),
        ([(b"authorization", "Bearer ключ".encode())], 401),
        ([(b"authorization", b"Bearer \xff\xfe")], 401),
    ],
)
def test_headers_of_keys(headers, status):
    assert _send(_app()[0], CHAT, headers=headers)[0] == status


@pytest.mark.parametrize("text", ["", ",", " , "])
def test_an_empty_list_of_keys_stops_the_start(monkeypatch, text):
    monkeypatch.setenv("DEJAKV_API_KEYS", text)
    with pytest.raises(ConfigError, match="holds no key"):
        _app(keys=None)


def test_keys_from_the_environment_and_a_file(monkeypatch, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nfrom-file\n")
    monkeypatch.setenv("DEJAKV_API_KEYS_FILE", str(file))
    monkeypatch.setenv("DEJAKV_API_KEYS", "listed")
    app, _ = _app(keys=None)
    assert [_send(app, CHAT, headers=_bearer(key))[0] for key in (b"listed", b"from-file", b"other")] == [200, 200, 401]
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        _app(keys=None)


@pytest.mark.parametrize(
    ("raw", "status", "words"),
    [
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", 400, b"nested"),
        (b"[" * 100_000, 400, b"nested"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, 400, b"nested"),
        (b'{"a":[' + b"[]," * 1_000_000 + b"[]]}", 413, b"values"),
        (b'{"a":"\xff"}', 400, b"UTF-8"),
        ('{"a":1}'.encode("utf-16"), 400, b"UTF-8"),
        (b'{"a":NaN}', 400, b"no number"),
        (b'{"a":-Infinity}', 400, b"no number"),
        (b'{"a":' + b"9" * 5000 + b"}", 400, b"JSON"),
        (b'{"a":"\\ud800"}', 400, b"Unicode"),
        (b"{not json", 400, b"JSON"),
        (b"[1]", 400, b"no JSON object"),
        (b"", 400, b"JSON"),
    ],
)
def test_bodies_that_are_refused(raw, status, words):
    app, upstream = _app()
    found, answer, _ = _send(app, CHAT, headers=_bearer(b"alpha"), chunks=(raw,))
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
    ],
)
def test_headers_of_bodies(headers, status):
    app, upstream = _app()
    found, _, read = _send(app, CHAT, headers=[*_bearer(b"alpha"), *headers])
    assert found == status
    assert read == (1 if status == 200 else 0)
    if upstream.reached:
        inner = upstream.reached[0][0]["headers"]
        assert [value for name, value in inner if name == b"content-type"] == [b"application/json"]
        assert not [name for name, _ in inner if name == b"transfer-encoding"]


def test_a_body_that_grows_too_long_or_does_not_come():
    app, upstream = _app(limits=Limits(max_bytes=100, seconds=0.05))
    status, _, read = _send(app, CHAT, headers=_bearer(b"alpha"), chunks=[b" " * 60] * 50)
    assert (status, read) == (413, 2)
    sent = []

    async def receive():
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": _bearer(b"alpha")}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 408
    assert _send(app, CHAT, headers=_bearer(b"alpha"), chunks=())[0] == 400
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
    mine, other = _post(body, "alpha", path), _post(body, "beta", path)
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
    body = _post(raw)
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
    limits = Limits()
    try:
        sent = parse_object(json.dumps(body).encode(), limits)
        written(sent)
    except Refused:
        return
    before = json.loads(json.dumps(sent))
    assert own(sent, "p") == ""
    assert sent == {**before, "cache_salt": "p"}


def test_answers_of_others_are_not_continued():
    app, upstream = _app()
    status, answer, _ = _send(
        app, "/v1/responses", headers=_bearer(b"alpha"), chunks=(b'{"previous_response_id": "resp_1"}',)
    )
    assert status == 400
    assert b"send the conversation itself" in answer
    assert not upstream.reached
