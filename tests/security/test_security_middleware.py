"""Who gets through vLLM's middleware: keys, paths, methods, sockets."""

import json
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette._utils import get_route_path
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from tests.security.probes import CHAT, MANY, PATHS, app_of, bearer, send_to

from dejakv.adopt.routes import CLIENT, EVERYBODY
from dejakv.errors import ConfigError

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
    app, upstream = app_of()
    headers = [] if key is None else bearer(key)
    status, _, read = send_to(app, path, method=method, headers=headers, root=root, chunks=(body,))
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
        app, upstream = app_of()
        body = json.dumps({"cache_salt": "forged"}).encode()
        for key in (b"alpha", b"beta"):
            status, _, _ = send_to(app, full, headers=bearer(key), root=root, chunks=(body[:5], body[5:]))
            assert status == 200
        salts = [json.loads(raw)["cache_salt"] for _, raw in upstream.reached]
        assert len(set(salts)) == 2
        assert "forged" not in salts


def test_percent_encoding_and_slashes_through_a_real_client():
    """As a server decodes paths, and with a root path of its own."""
    app, upstream = app_of()
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
    app, upstream = app_of()
    with pytest.raises(WebSocketDisconnect) as closed, TestClient(app).websocket_connect("/v1/realtime"):
        pass
    assert closed.value.code == 1008
    assert not upstream.reached


def test_the_operator_may_do_the_rest(monkeypatch):
    monkeypatch.setenv("DEJAKV_OPERATOR_KEY", "boss")
    app, upstream = app_of()
    assert send_to(app, "/sleep", headers=bearer(b"boss"))[0] == 200
    assert send_to(app, CHAT, headers=bearer(b"boss"))[0] == 401
    status, answer, _ = send_to(app, "/sleep", headers=bearer(b"alpha"))
    assert status == 403
    assert b"DEJAKV_OPERATOR_KEY" in answer
    assert len(upstream.reached) == 1


def test_without_keys_every_route_is_open_and_bodies_have_one_partition():
    app, upstream = app_of(keys=())
    assert send_to(app, "/sleep")[0] == 200
    assert send_to(app, CHAT, chunks=(b'{"cache_salt": "forged"}',))[0] == 200
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
    assert send_to(app_of()[0], CHAT, headers=headers)[0] == status


def test_keys_from_the_environment_and_a_file(monkeypatch, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nfrom-file\n")
    monkeypatch.setenv("DEJAKV_API_KEYS_FILE", str(file))
    monkeypatch.setenv("DEJAKV_API_KEYS", "listed")
    app, _ = app_of(keys=None)
    assert [send_to(app, CHAT, headers=bearer(key))[0] for key in (b"listed", b"from-file", b"other")] == [
        200,
        200,
        401,
    ]
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        app_of(keys=None)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wish", [None, {"mode": "exact"}, {"mode": "adopt"}, "no object", {"no_store": False}])
def test_nothing_is_kept_of_a_request_that_says_so_in_its_headers(path, wish):
    app, upstream = app_of()
    asked = {"prompt": "x"} if wish is None else {"prompt": "x", "kv_transfer_params": {"dejakv": wish}}
    headers = [*bearer(b"alpha"), (b"cache-control", b"max-age=0"), (b"Cache-Control", b"No-Store")]
    for _ in range(2):
        assert send_to(app, path, headers=headers, chunks=(json.dumps(asked).encode(),))[0] == 200
    sent = [json.loads(raw) for _, raw in upstream.reached]
    assert [body["kv_transfer_params"]["dejakv"]["no_store"] for body in sent] == [True, True]
    assert len({body["cache_salt"] for body in sent}) == 2
