"""Requests of our own to vLLM's application, from within: no address and no key of ours is needed."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, cast

_KEYS = (b"authorization", b"x-api-key", b"host")
"""Headers of the client's that vLLM's own checks may want."""


async def ask(app: Any, scope: Mapping[str, Any], body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Sends a body to a route as a client did; the status and the JSON object of the answer, empty if it is none.

    Cancelled, it ends as for a client who leaves: vLLM stops the request.
    """
    raw = json.dumps(body).encode()
    headers = [(name, value) for name, value in scope["headers"] if name.lower() in _KEYS]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    status, parts = 0, bytearray()
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # nobody disconnects
        sent = True
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        parts.extend(message.get("body", b""))

    await app({**scope, "headers": headers, "state": dict(scope.get("state") or {})}, receive, send)
    try:
        answer = json.loads(parts)
    except ValueError:
        answer = {}
    return status, cast(dict[str, Any], answer) if isinstance(answer, dict) else {}
