"""What a middleware passes on and answers by itself, as ASGI messages."""

import json
from collections.abc import Sequence
from typing import Any

from dejakv.engines.vllm.bodies import Refused


def replay(raw: bytes, receive: Any) -> Any:
    """A `receive` that gives the whole body first."""
    sent = False

    async def replay() -> Any:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return replay


def with_length(scope: Any, length: int) -> Any:
    """The scope of a request whose body was written anew, as JSON."""
    ours = {b"content-length", b"content-type", b"transfer-encoding"}
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in ours]
    headers += [(b"content-length", str(length).encode()), (b"content-type", b"application/json")]
    return {**scope, "headers": headers}


async def refuse(scope: Any, send: Any, refused: Refused) -> None:
    """Answers a request, or a WebSocket, that goes no further."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": str(refused)[:120]})
        return
    error = {"message": str(refused), "type": "invalid_request_error", "code": refused.status}
    more = [(b"connection", b"close")]  # the rest of a body may still be on its way
    if refused.status == 401:
        more.append((b"www-authenticate", b"Bearer"))
    await answer(send, refused.status, {"error": error}, more)


async def answer(send: Any, status: int, value: Any, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Answers with a JSON value."""
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
