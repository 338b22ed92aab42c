"""A body that is too large is refused before it is read into memory."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_REFUSAL = (
    b'{"error":{"message":"the body is larger than this server takes","type":"invalid_request_error","code":413}}'
)


class BodyLimit:
    """ASGI middleware: 413 for bodies over `max_bytes`, by their header or, without one, once they have grown too long."""

    def __init__(self, app: Any, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.max_bytes:
            await _refuse(send)
            return
        seen = 0
        refused = False

        async def counted() -> MutableMapping[str, Any]:
            nonlocal seen, refused
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:
                refused = True
                await _refuse(send)
                return {"type": "http.disconnect"}
            return message

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if not refused:
                await send(message)

        await self.app(scope, counted, guarded)


async def _refuse(send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": _REFUSAL})
