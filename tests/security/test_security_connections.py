"""Connections: how long the server waits for slow, silent and unreading clients, how many it takes, and what is left of them."""

import json
import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from tests.serving import Running, until

from dejakv.server.settings import ServerSettings

COMPLETE = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture
def hasty(docs_engine: Any) -> Iterator[Running]:
    """A server that waits for nobody."""
    settings = ServerSettings(header_seconds=0.3, body_seconds=0.3, send_seconds=0.3, max_connections=40)
    with Running(settings, docs_engine) as running:
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


def test_connections_that_send_nothing_or_half_a_header_are_closed(hasty: Running) -> None:
    for sent in (b"", b"P", HEAD, HEAD + b"x-1: "):
        assert closed(hasty.connect(sent)) == b""
    drip(hasty.connect(HEAD), b"x: 1\r\n")


def test_a_slow_body_is_refused_and_its_connection_closed(hasty: Running) -> None:
    for answer in (
        closed(hasty.connect(HEAD + b"content-length: 100\r\n\r\n{")),
        drip(hasty.connect(HEAD + b"content-length: 100000\r\n\r\n{"), b" "),
        drip(hasty.connect(HEAD + b"transfer-encoding: chunked\r\n\r\n"), b"1\r\n \r\n"),
    ):
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"DEJAKV_BODY_SECONDS" in answer


def test_a_refused_body_is_not_taken_for_ever(docs_engine: Any) -> None:
    settings = ServerSettings(api_keys="alpha", header_seconds=0.3)
    with Running(settings, docs_engine) as running:
        answer = drip(running.connect(HEAD + b"content-length: 100000\r\n\r\n{"), b" ")
    assert answer.startswith(b"HTTP/1.1 401")


def test_a_client_that_does_not_read_is_dropped(hasty: Running) -> None:
    asks = HEAD.replace(b"POST /v1/completions", b"GET /openapi.json") + b"\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", hasty.port))
        connection.sendall(asks * 500)  # some 10 MB of answers: more than sockets hold
        waiting = select.poll()
        waiting.register(connection, select.POLLHUP | select.POLLERR)
        assert waiting.poll(30_000), "the connection stayed open for 30 seconds"


def test_more_connections_than_allowed_are_closed_and_the_others_served(docs_engine: Any) -> None:
    with Running(ServerSettings(max_connections=3), docs_engine) as running, ExitStack() as opened:
        kept = [opened.enter_context(running.connect()) for _ in range(3)]
        for _ in range(20):
            with suppress(ConnectionResetError):  # closed before connect() returned
                assert closed(running.connect()) == b""
        for connection in kept:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert closed(connection).startswith(b"HTTP/1.1 200")


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
        HEAD + b"x: " + b"a" * 20_000 + b"\r\n\r\n",
        HEAD + b"upgrade: websocket\r\nconnection: upgrade\r\ncontent-length: 0\r\n\r\n",
    ],
)
def test_what_is_no_plain_http_is_refused(hasty: Running, raw: bytes) -> None:
    answer = closed(hasty.connect(raw))
    assert answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 408", b"HTTP/1.1 413", b"HTTP/1.1 422", b"HTTP/1.1 431")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_request_with_two_lengths_is_the_last_of_its_connection(hasty: Running) -> None:
    """What a proxy takes for its body, by the one length, is not answered as another request, by the other (RFC 9112, 6.1)."""
    body = b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    lengths = b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n" % len(body)
    received = closed(hasty.connect(HEAD + lengths + body))
    assert received.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in received.lower()


def test_bodies_share_a_budget(docs_engine: Any) -> None:
    settings = ServerSettings(max_body_bytes=4096, max_bodies_bytes=8192)
    body = json.dumps({"prompt": "ann lives in", "max_tokens": 1}).encode()
    with Running(settings, docs_engine) as running:
        half = [running.connect(HEAD + b"content-length: 4096\r\n\r\n" + b" " * 4000) for _ in range(2)]
        until(lambda: running.app.state.bodies.held >= 8000)
        refused = running.http.post(COMPLETE, content=body + b" " * 400, headers={"Content-Type": "application/json"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "DEJAKV_MAX_BODIES_BYTES" in refused.json()["error"]["message"]
        for connection in half:
            connection.close()
        until(lambda: not running.app.state.bodies.held)
        served = running.http.post(COMPLETE, content=body + b" " * 400, headers={"Content-Type": "application/json"})
        assert served.status_code == 200
        until(lambda: not running.app.state.bodies.held)


@pytest.mark.soak
def test_nothing_is_left_of_hostile_clients(hasty: Running) -> None:
    """Connections, memory for bodies, places in the queue, threads and files: all given back. Longer with
    `DEJAKV_SOAK_ROUNDS`."""
    body = b'{"prompt":"ann lives in","max_tokens":20}'
    whole = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body

    def round_of_clients() -> None:
        hostile = [
            b"",
            HEAD,
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
        until(lambda: not (hasty.server.server_state.connections or hasty.app.state.bodies.held or worker.waiting))
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for _ in range(3):  # the pool of threads fills
        round_of_clients()
    files, threads = held()
    for _ in range(3 * int(os.environ.get("DEJAKV_SOAK_ROUNDS", "1"))):
        round_of_clients()
    after = held()
    assert after[0] <= files + 5
    assert after[1] <= threads + 5
