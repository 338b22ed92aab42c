"""Connections: slow and refused bodies, requests that are no plain HTTP, and what is left of hostile clients."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from tests.serving import Running, until

from dejakv.http import asgi
from dejakv.server.settings import ServerSettings

COMPLETE = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def hasty(docs_engine: Any) -> Iterator[Running]:
    """A server that waits for no body."""
    with Running(ServerSettings(body_seconds=0.3, max_body_bytes=4096), docs_engine) as running:
        yield running


def closed(connection: socket.socket) -> bytes:
    """What the server sent until it closed the connection."""
    received = b""
    with connection, suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            received += piece
    return received


def drip(connection: socket.socket, piece: bytes) -> bytes:
    """What the server sent while a piece came now and then, until it closed the connection."""
    received = b""
    connection.settimeout(0.05)
    with connection:
        for _ in range(600):
            try:
                connection.sendall(piece)
                if not (got := connection.recv(65536)):
                    return received
                received += got
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                return received
    raise AssertionError("the connection stayed open for 30 seconds")


def test_a_slow_body_is_refused_and_its_connection_closed(hasty: Running) -> None:
    for answer in (
        closed(hasty.connect(HEAD + b"content-length: 100\r\n\r\n{")),
        drip(hasty.connect(HEAD + b"content-length: 4000\r\n\r\n{"), b" "),
        drip(hasty.connect(HEAD + b"transfer-encoding: chunked\r\n\r\n"), b"1\r\n \r\n"),
    ):
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"0.3 seconds" in answer


def test_a_refused_body_is_not_taken_for_ever(hasty: Running, docs_engine: Any) -> None:
    head = HEAD + b"content-length: 4000\r\n\r\n{"
    with Running(ServerSettings(api_keys="alpha"), docs_engine) as running:
        assert drip(running.connect(head), b" ").startswith(b"HTTP/1.1 401")
    for refused, status in (
        (head.replace(b"4000", b"9999"), b"413"),
        (head.replace(b"application/json", b"text/plain"), b"415"),
        (HEAD + b"content-type: application/json\r\ncontent-length: 4000\r\n\r\n{", b"400"),
    ):
        assert drip(hasty.connect(refused), b" ").startswith(b"HTTP/1.1 " + status)


def test_a_body_that_never_ends_is_discarded_for_a_while_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece may come in the very moment in which the time is over."""
    monkeypatch.setattr(asgi, "LINGER_SECONDS", 0.05)
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    async def refused() -> None:
        _, closing = asgi.linger_before_close(receive, send)
        await closing({"type": "http.response.start", "status": 413, "headers": [(b"connection", b"close")]})
        await closing({"type": "http.response.body", "body": b"too large"})

    for _ in range(20):
        asyncio.run(refused())
    assert [message.get("more_body", False) for message in sent] == [False, True, False] * 20


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\xff\x16\x03\x01" * 50,
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}",
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: " + b"9" * 5000 + b"\r\n\r\n",
        HEAD + b"content-length: +1\r\n\r\n{",
        HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n",
        HEAD + b"content-length : 1\r\n\r\n{",
        HEAD + b"x: " + b"a" * 100_000 + b"\r\n\r\n",
        HEAD + b"upgrade: websocket\r\nconnection: upgrade\r\ncontent-length: 0\r\n\r\n",
    ],
)
def test_what_is_no_plain_http_is_refused(hasty: Running, raw: bytes) -> None:
    answer = closed(hasty.connect(raw))
    assert answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 408", b"HTTP/1.1 413", b"HTTP/1.1 422", b"HTTP/1.1 431")
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("head", [HEAD, b"GET /health HTTP/1.1\r\nhost: x\r\n"])
def test_a_request_with_two_lengths_is_the_last_of_its_connection(hasty: Running, head: bytes) -> None:
    """What a proxy takes for its body, by the one length, is not answered as another request, by the other (RFC 9112, 6.1)."""
    body = b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    lengths = b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n" % len(body)
    received = closed(hasty.connect(head + lengths + body))
    assert received.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in received.lower()


@pytest.mark.soak
def test_nothing_is_left_of_hostile_clients(hasty: Running) -> None:
    """Connections, memory for bodies, places in the queue, threads and files: all given back. Longer with
    `DEJAKV_SOAK_ROUNDS`."""
    body = b'{"prompt":"ann lives in","max_tokens":20}'
    whole = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    def round_of_clients() -> None:
        hostile = [
            HEAD + b"content-length: 100\r\n\r\n{",
            HEAD + b"content-length: 9\r\n\r\n[[[[[[[[[",
            whole,
        ]
        for sent in hostile * 4:
            hasty.connect(sent).close()
        waiting = [hasty.connect(sent) for sent in hostile * 4]
        for connection in waiting:
            closed(connection)
        assert hasty.http.get("/health").status_code == 200

    def held() -> tuple[int, int]:
        worker = hasty.app.state.service.worker
        until(lambda: not (hasty.server.server_state.connections or worker.waiting))
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for _ in range(3):  # the pool of threads fills
        round_of_clients()
    files, threads = held()
    for _ in range(3 * int(os.environ.get("DEJAKV_SOAK_ROUNDS", "1"))):
        round_of_clients()
    after = held()
    assert after[0] <= files + 5
    assert after[1] <= threads + 5
