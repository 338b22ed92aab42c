"""`StabilizeMiddleware` before an application, and `ForwardingApp` before a server at another address."""

import asyncio
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from tests.serving import until

from dejakv.adopt import ServerMiddleware
from dejakv.errors import ConfigError
from dejakv.server.app import address_of, listening_socket
from dejakv.stabilize import ForwardingApp, StabilizeMiddleware, StabilizeSettings

DATED = {"role": "system", "content": "Help.\nStep 1 of 9"}
CHAT = {"model": "m", "temperature": 0, "messages": [DATED, {"role": "user", "content": "Where is Ann?"}]}
UNSORTED = {**CHAT, "tools": [{"name": "b", "input_schema": {}}, {"name": "a", "input_schema": {}}]}
JSON = {"content-type": "application/json"}


class Upstream:
    """Answers with the length of the last message, whole or as a stream, and keeps all requests."""

    def __init__(self, always: str = "") -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.always = always
        self.left = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        target = scope["raw_path"].decode() + "?" + scope["query_string"].decode()
        self.requests.append((target, headers, raw))
        if scope["path"].endswith("/endless"):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
            return

        body = json.loads(raw) if raw.startswith(b"{") and raw.rstrip().endswith(b"}") else {}
        said = self.always or str(len(str((body.get("messages") or [""])[-1])))
        if body.get("stream"):
            pieces = [json.dumps({"choices": [{"index": 0, "delta": {"content": letter}}]}) for letter in said]
            answer = "".join(f"data: {piece}\n\n" for piece in [*pieces, "[DONE]"]).encode()
        else:
            answer = json.dumps({"choices": [{"index": 0, "message": {"content": said}}]}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-upstream", b"yes")]})
        await send({"type": "http.response.body", "body": answer})


def asked(app: Any, *bodies: Any, path: str = "/v1/chat/completions", **headers: str) -> list[httpx.Response]:
    """Answers of an application to requests, one after the other; a body may be bytes."""

    async def all_of_them() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
            contents = [body if isinstance(body, bytes) else json.dumps(body).encode() for body in bodies]
            return [await client.post(path, content=each, headers={**JSON, **headers}) for each in contents]

    return asyncio.run(all_of_them())


def metrics_of(app: Any) -> dict[str, float]:
    async def read() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
            return (await client.get("/stabilize/metrics")).text

    lines = [line.rsplit(" ", 1) for line in asyncio.run(read()).splitlines() if not line.startswith("#")]
    return {name.removeprefix("dejakv_stabilize_"): float(value) for name, value in lines}


def test_a_changed_request_says_what_was_changed_and_what_it_gained() -> None:
    app = StabilizeMiddleware(upstream := Upstream(), StabilizeSettings(rules=("volatile",)))
    turns = []
    for step in range(1, 4):
        messages = [{"role": "system", "content": f"Step {step} of 9\n" + "Help. " * 40}]
        messages += [{"role": "user", "content": f"question {n} " * 9} for n in range(step)]
        turns.append({"model": "m", "messages": messages})
    answers = asked(app, *turns)
    assert [answer.headers["x-dejakv-stabilized"] for answer in answers] == ["volatile"] * 3
    assert "Step 2 of 9" in json.loads(upstream.requests[1][2])["messages"][-1]["content"]
    sent, _, length, unit, given, *_ = answers[2].headers["x-dejakv-prefix"].replace(",", "").split()
    assert unit == "characters"
    assert int(length) > int(sent) > 300 > int(given)
    assert answers[0].headers["x-upstream"] == "yes"
    figures = metrics_of(app)
    assert figures['requests_total{outcome="changed"}'] == figures['rules_total{rule="volatile"}'] == 3
    assert figures['prefix_sent_total{unit="characters"}'] > 600 > figures['prefix_given_total{unit="characters"}']


def test_a_tokenizer_counts_tokens() -> None:
    app = StabilizeMiddleware(Upstream(), StabilizeSettings(model="smollm2-135m"))
    body = {"model": "m", "messages": [{"role": "user", "content": "one two three four " * 20}]}
    first, second = asked(app, body, body)
    assert first.headers["x-dejakv-prefix"] == "0 of 87 tokens, 0 as it came"
    assert second.headers["x-dejakv-prefix"] == "80 of 87 tokens, 80 as it came"
    assert "x-dejakv-stabilized" not in second.headers


def test_the_first_million_characters_are_counted() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "one two " * 130_000}]}
    assert asked(StabilizeMiddleware(Upstream()), body)[0].headers["x-dejakv-prefix"].startswith("0 of 1000000 ")


def test_clients_learn_nothing_of_each_other_and_no_store_keeps_nothing() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "one two three four " * 20}]}
    app = StabilizeMiddleware(Upstream())
    prefix = [
        asked(app, body, **headers)[0].headers["x-dejakv-prefix"].split()[0]
        for headers in (
            {"authorization": "Bearer a", "cache-control": "no-store"}, {"authorization": "Bearer a"},
            {"authorization": "Bearer b"}, {"x-api-key": "Bearer a"}, {"api-key": "Bearer a"}, {"cookie": "a"},
            {"authorization": "Bearer a"},
        )
    ]  # fmt: skip
    assert prefix[:6] == ["0"] * 6
    assert int(prefix[6]) > 300
    salted = asked(app, *({**body, "cache_salt": salt} for salt in "aba"), authorization="Bearer a")
    assert [answer.headers["x-dejakv-prefix"].startswith("0 of") for answer in salted] == [True, True, False]


@pytest.mark.parametrize("forwarded", [False, True])
@pytest.mark.parametrize(
    ("path", "raw", "headers"),
    [
        ("/v1/chat/completions", json.dumps({**UNSORTED, "new": 1}).encode(), {}),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], ', {}),
        ("/v1/chat/completions", json.dumps(UNSORTED).encode(), {"content-type": "text/plain"}),
        ("/v1/chat/completions", json.dumps(UNSORTED).encode(), {"content-digest": "sha-256=:x:"}),
        ("/v1/chat/completions", json.dumps(UNSORTED).encode(), {"content-encoding": "gzip"}),
        ("/v1/chat/completions", json.dumps(UNSORTED).encode() + b" " * 5000, {}),
        ("/v1/messages/count_tokens", json.dumps(UNSORTED).encode(), {}),
        ("/v1/embeddings?a=%2Fb", json.dumps(UNSORTED).encode(), {}),
        ("/v1/chat/completions", b"", {}),
    ],
)
def test_what_is_not_known_reaches_the_server_byte_for_byte(
    forwarded: bool, path: str, raw: bytes, headers: dict[str, str]
) -> None:
    upstream = Upstream()
    inner = ForwardingApp("http://up/v1", httpx.ASGITransport(upstream)) if forwarded else upstream
    (answer,) = asked(StabilizeMiddleware(inner, StabilizeSettings(max_body_bytes=5000)), raw, path=path, **headers)
    ((target, seen, body),) = upstream.requests
    assert (answer.status_code, body) == (200, raw)
    assert target == path + ("" if "?" in path else "?")
    assert headers.items() <= seen.items()
    assert seen["content-length"] == str(len(raw))
    assert ("x-dejakv-unstabilized" in answer.headers) is path.endswith("/chat/completions")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("always", "result"), [("same", "equal"), ("", "different")])
def test_check_answers_the_clients_own_form_and_compares(stream: bool, always: str, result: str) -> None:
    upstream = Upstream(always)
    app = StabilizeMiddleware(upstream, StabilizeSettings(rules=("volatile",), check=True))
    (answer,) = asked(app, {**CHAT, "stream": stream})
    own, other = (json.loads(raw) for _, _, raw in upstream.requests)
    assert own == {**CHAT, "stream": stream}
    assert other["messages"][-1]["content"] == "Where is Ann?\nStep 1 of 9"
    assert answer.text.count("s") >= bool(always)
    assert answer.headers["x-dejakv-check"] == "the answer is to the request as it came"
    assert metrics_of(app)[f'checks_total{{answers="{result}"}}'] == 1


def test_behind_the_middleware_of_keys_clients_need_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEJAKV_API_KEYS", "one")
    app = ServerMiddleware(StabilizeMiddleware(upstream := Upstream()))
    assert asked(app, UNSORTED)[0].status_code == 401
    (answer,) = asked(app, UNSORTED, authorization="Bearer one")
    assert answer.headers["x-dejakv-stabilized"] == "keys, tools"
    assert json.loads(upstream.requests[0][2])["cache_salt"].startswith("key-")
    assert asked(app, UNSORTED, path="/stabilize/metrics", authorization="Bearer one")[0].status_code == 403


def test_switched_off_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEJAKV_OFF", "1")
    (answer,) = asked(StabilizeMiddleware(upstream := Upstream()), UNSORTED)
    assert json.loads(upstream.requests[0][2]) == UNSORTED
    assert "x-dejakv-stabilized" not in answer.headers


def test_check_compares_no_sampled_answers() -> None:
    upstream = Upstream()
    app = StabilizeMiddleware(upstream, StabilizeSettings(rules=("volatile",), check=True))
    asked(app, {**CHAT, "temperature": 0.7}, {"model": "m", "messages": CHAT["messages"]})
    assert metrics_of(app)['checks_total{answers="not_compared"}'] == len(upstream.requests) == 2


def test_check_compares_no_part_of_an_answer() -> None:
    """A client that leaves a stream has a part, and waits for no other answer; nor is a long answer kept whole."""
    sent_pieces: list[bytes] = []

    async def upstream(scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        sent_pieces.append(body["messages"][-1]["content"].encode())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        piece = b'data: {"choices": [{"index": 0, "delta": {"content": "%b"}}]}\n\n' % body["user"].encode()
        for _ in range(2 if body["user"] == "gone" else 17):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if body["user"] != "gone":
            await send({"type": "http.response.body", "body": b""})

    app = StabilizeMiddleware(upstream, StabilizeSettings(rules=("volatile",), check=True))

    async def send(message: Any) -> None: ...

    for user in ("gone", "x" * 1024**2):
        raw = json.dumps({**CHAT, "user": user}).encode()
        scope = {
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip

        async def receive(raw: bytes = raw) -> Any:
            return {"type": "http.request", "body": raw}

        asyncio.run(app(scope, receive, send))
    assert sent_pieces == [b"Where is Ann?"] * 2, "the other form is not sent"
    assert metrics_of(app)['checks_total{answers="not_compared"}'] == 2


@pytest.mark.parametrize(
    "value", ["{", "[]", '{"rules": ["date"]}', '{"rules": "tools"}', '{"speed": 1}', '{"check": 1}']
)
def test_settings_that_are_wrong_are_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DEJAKV_STABILIZE", value)
    with pytest.raises(ConfigError):
        StabilizeMiddleware(Upstream())


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "8000"])
def test_what_is_no_address_is_a_mistake_with_the_remedy(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address: give one such as"):
        ForwardingApp(url)


@pytest.mark.parametrize("url", ["http://ann:secret@host", "https://secret@host/v1", "ann:secret@host", "x://:secret@"])
def test_an_address_with_a_password_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match=r"leave it out|such as http") as caught:
        ForwardingApp(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "target", [b"*", b"http://a/b", b"/v1/../admin", b"/v1/%2E%2e/admin", b"/v1/..%2fa", b"/.", b"/\xff"]
)
def test_targets_that_lead_elsewhere_are_refused(target: bytes) -> None:
    app, sent = ForwardingApp("http://up/v1", httpx.ASGITransport(upstream := Upstream())), list[Any]()

    async def receive() -> Any:
        await asyncio.sleep(0)
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "OPTIONS", "path": "*", "raw_path": target, "query_string": b"", "headers": []}
    asyncio.run(app(scope, receive, send))
    assert (sent[0]["status"], upstream.requests) == (400, [])
    assert "send a path" in json.loads(sent[1]["body"])["error"]["message"]


def test_headers_that_connection_names_are_not_passed_on() -> None:
    answer = httpx.Response(
        200, headers={"connection": "X-Hop", "x-hop": "1", "x-end": "1"}, stream=httpx.ByteStream(b"{}")
    )
    requests: list[httpx.Request] = []

    def upstream(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return answer

    app = ForwardingApp("http://up", httpx.MockTransport(upstream))
    (got,) = asked(app, CHAT, connection="keep-alive, X-Token", **{"x-token": "1", "x-other": "1"})
    assert {"x-token", "x-other"} & requests[0].headers.keys() == {"x-other"}
    assert {"x-hop", "x-end"} & got.headers.keys() == {"x-end"}


def test_a_server_that_is_down_is_a_bad_gateway() -> None:
    (answer,) = asked(StabilizeMiddleware(ForwardingApp("http://127.0.0.1:9")), CHAT)
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "server_error")
    assert "cannot be reached" in answer.json()["error"]["message"]


@contextmanager
def running(app: Any, **tls: Any) -> Iterator[str]:
    """The address of an application on a port of this machine."""
    with listening_socket("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(app, http="h11", ws="none", log_level="error", **tls))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        until(lambda: server.started)
        yield address_of(listener)
        server.should_exit = True
        thread.join()


def test_an_authority_of_ones_own_is_read_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    line = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*line.split(), "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    with running(Upstream(), ssl_certfile=certificate, ssl_keyfile=key) as address:
        url = address.replace("http:", "https:")
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with running(ForwardingApp(url)) as proxy:
            assert httpx.get(proxy).status_code == 502
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with running(ForwardingApp(url)) as proxy:
            assert httpx.get(proxy).status_code == 200
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match=r"SSL_CERT_FILE .* cannot be read"):
        ForwardingApp(url)


@pytest.fixture(scope="module")
def over_sockets() -> Iterator[tuple[Upstream, str]]:
    """A server and a proxy before it, both on ports of this machine; and the proxy's address."""
    upstream = Upstream()
    with running(upstream) as behind, running(StabilizeMiddleware(ForwardingApp(behind))) as address:
        yield upstream, address


def test_a_stream_is_passed_on_as_it_comes_and_ends_with_its_client(over_sockets: tuple[Upstream, str]) -> None:
    upstream, address = over_sockets
    with httpx.stream("POST", f"{address}/endless", content=b"x" * 300_000, timeout=30) as answer:
        assert next(answer.iter_raw()) == b"begun", "the first piece comes before the last"
    assert upstream.requests[-1][2] == b"x" * 300_000
    until(upstream.left.is_set)


def test_requests_without_a_body_and_both_protocols_go_through(over_sockets: tuple[Upstream, str]) -> None:
    upstream, address = over_sockets
    assert httpx.get(f"{address}/v1/models?a=1").status_code == 200
    assert upstream.requests[-1][0] == "/v1/models?a=1"
    assert upstream.requests[-1][1]["host"] not in address, "the server is called by its own name"
    for path in ("/v1/messages", "/v1/chat/completions"):
        assert httpx.post(address + path, json=UNSORTED).headers["x-dejakv-stabilized"] == "keys, tools"
        assert [tool["name"] for tool in json.loads(upstream.requests[-1][2])["tools"]] == ["a", "b"]
