"""Parts of ASGI requests, the replay of rewritten bodies, and the end of a connection."""

import asyncio
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

from dejakv.http.errors import Receive, RefusedError, Scope, Send

LINGER_SECONDS, PIECE_SECONDS = 2.0, 0.5
"""Most seconds for the rest of an answered request's body, and for each piece of it."""

UNBUFFERED = {"X-Accel-Buffering": "no"}
"""Header of streamed answers, which nginx would otherwise hold back until they are complete."""


def headers_of(scope: Mapping[str, Any], name: bytes) -> list[str]:
    """Return the values of a header that may occur several times. `name` is in lower case."""
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]


def header_of(scope: Mapping[str, Any], name: bytes) -> str | None:
    """Return a header's value, None without it. `name` is in lower case.

    Raises
    ------
    RefusedError
        If the header occurs twice.
    """
    values = headers_of(scope, name)
    if len(values) > 1:
        raise RefusedError(
            400, f"the header {name.decode()} is there {len(values)} times: send it once"
        )

    return values[0] if values else None


def check_lengths(scope: Mapping[str, Any]) -> None:
    """Refuse (400) a request with both Content-Length and Transfer-Encoding.

    A proxy may have read its body by the other one, and the rest would be answered as another
    request (RFC 9112, 6.1).

    Raises
    ------
    RefusedError
        If both headers occur.
    """
    if headers_of(scope, b"content-length") and headers_of(scope, b"transfer-encoding"):
        raise RefusedError(
            400, "both Content-Length and Transfer-Encoding are given: send one of them"
        )


def route_path(scope: Mapping[str, Any]) -> str:
    """Return the path that an application's router compares: the path without the root path.

    Starlette's `get_route_path` follows the same rule.

    Examples
    --------
    >>> route_path({"path": "/api/v1/models", "root_path": "/api"})
    '/v1/models'
    """
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    if not path.startswith(root):
        return path
    rest = path[len(root) :]
    return rest if not rest or rest.startswith("/") else path


def replay(messages: Iterable[MutableMapping[str, Any]], receive: Receive) -> Receive:
    """Make a `receive` that returns messages that were read, and then what `receive` does."""
    waiting = iter(messages)

    async def replayed() -> MutableMapping[str, Any]:
        message = next(waiting, None)
        return await receive() if message is None else message

    return replayed


def replay_body(raw: bytes, receive: Receive) -> Receive:
    """Make a `receive` that returns the whole body first, and then what `receive` does."""
    return replay([{"type": "http.request", "body": raw, "more_body": False}], receive)


def with_length(scope: Scope, length: int) -> Scope:
    """Return the scope of a request whose body was written anew, as JSON of `length` bytes."""
    # The rewritten body has a length of its own, and is sent in one piece.
    ours = {b"content-length", b"content-type", b"transfer-encoding"}
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in ours]
    headers += [(b"content-length", str(length).encode()), (b"content-type", b"application/json")]
    return {**scope, "headers": headers}


def linger_before_close(receive: Receive, send: Send) -> tuple[Receive, Send]:
    """Wrap receive and send so that an early answer with `Connection: close` is not lost.

    If such an answer ends before the body was read, the rest of the body is read and discarded, for
    at most 2 seconds, before the last message. A socket closed with bytes unread is reset, and a
    reset can take the answer from a client that still sends (RFC 9112, 9.6).

    Returns
    -------
    tuple[Receive, Send]
        The wrapped functions, to be used together.
    """
    unread, closes = True, False

    async def received() -> MutableMapping[str, Any]:
        nonlocal unread
        message = await receive()
        unread = bool(message.get("more_body"))
        return message

    async def sent(message: MutableMapping[str, Any]) -> None:
        nonlocal closes
        if message["type"] == "http.response.start":
            closes = (b"connection", b"close") in message["headers"]
        last = message["type"] == "http.response.body" and not message.get("more_body")
        if not (closes and unread and last):
            await send(message)
            return
        # The answer is out, and the connection ends with the empty message below.
        await send({**message, "more_body": True})
        clock = asyncio.get_running_loop().time
        until = clock() + LINGER_SECONDS
        with suppress(TimeoutError):
            while unread and clock() < until:
                # For each piece too, so that a client that sends nothing is not waited for.
                async with asyncio.timeout_at(min(until, clock() + PIECE_SECONDS)):
                    await received()

        await send({"type": "http.response.body", "body": b""})

    return received, sent
