"""Requests that are refused, and OpenAI's error object for them."""

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from dejakv.errors import DejaKVError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_KINDS = {429: "rate_limit_error", 499: "client_error"} | dict.fromkeys(
    (500, 502, 503), "server_error"
)


class RefusedError(DejaKVError):
    """Refusal of a request with an HTTP status. The message names the limit and the remedy.

    Parameters
    ----------
    status : int
        HTTP status.
    message : str
        One sentence for the client.
    headers : Mapping[str, str], optional
        Further headers of the response.
    param, code : str, optional
        The wrong field, and the kind of fault, in OpenAI's error object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        headers: Mapping[str, str] | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.param, self.code = param, code


class ClientGoneError(RefusedError):
    """Departure of the client before its answer was ready. The response has no reader."""

    def __init__(self) -> None:
        super().__init__(499, "the client left")


def error_object(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Make OpenAI's error object.

    Examples
    --------
    >>> error_object(401, "no known API key")["error"]["type"]
    'invalid_request_error'
    """
    kind = _KINDS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def refuse(scope: Scope, send: Send, error: RefusedError) -> None:
    """Answer a request, or a WebSocket, that goes no further.

    The connection ends, because the rest of a body may still be on its way.
    """
    if scope["type"] == "websocket":
        # A close frame's reason has at most 123 bytes.
        await send({"type": "websocket.close", "code": 1008, "reason": str(error)[:120]})
        return

    body = json.dumps(error_object(error.status, str(error), error.param, error.code)).encode()
    fixed_headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    headers = [
        (name.lower().encode(), value.encode())
        for name, value in {**error.headers, **fixed_headers}.items()
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
