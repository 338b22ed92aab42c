"""The first step of a request: its headers are counted and its API key is checked before its body is read."""

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from dejakv.http.errors import Receive, RefusedError, Scope, Send
from dejakv.http.keys import ApiKeys, Caller, Callers, bearer_key
from dejakv.server.docs_page import ASSETS
from dejakv.server.problems import problem
from dejakv.server.settings import ServerSettings

OPEN = frozenset({"/", "/health", "/ready", "/docs", "/openapi.json", *(f"/docs/{name}" for name in ASSETS)})
"""Paths that need no key; without one they reveal nothing about requests."""


def callers_of(settings: ServerSettings) -> Callers:
    """The owner of each key. Raises: ConfigError for invalid keys."""
    file = Path(settings.api_keys_file).expanduser() if settings.api_keys_file is not None else None
    return Callers(ApiKeys.load(settings.api_keys, file, settings.partition_secret), settings.operator_key)


class Gate:
    """ASGI middleware. It puts the `Caller` into the request's state: nothing in a body identifies the caller."""

    def __init__(self, app: Any, keys: Callers, settings: ServerSettings) -> None:
        self.app = app
        self._keys = keys
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"this server speaks HTTP, not {scope['type']}")
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:
            send = _closing(send)
        try:
            scope.setdefault("state", {})["caller"] = self._caller(scope)
        except RefusedError as error:
            await problem(error.status, str(error), error.headers)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        size += len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        if len(headers) > self._settings.max_headers or size > self._settings.max_header_bytes:
            raise RefusedError(
                431,
                f"{len(headers)} headers of {size} bytes are over this server's limits of {self._settings.max_headers} "
                f"(DEJAKV_MAX_HEADERS) and {self._settings.max_header_bytes} bytes (DEJAKV_MAX_HEADER_BYTES): send fewer",
            )
        given = [value.decode("latin-1") for name, value in headers if name == b"authorization"]
        caller = self._keys.caller(bearer_key(given[0])) if len(given) == 1 else self._keys.caller(None)
        if caller is None and scope["path"].removeprefix(scope.get("root_path", "")) not in OPEN:
            raise RefusedError(
                401,
                "missing or unknown API key: send one header 'Authorization: Bearer KEY'",
                {"WWW-Authenticate": "Bearer"},
            )
        return caller


def _closing(send: Send) -> Send:
    """Ends the connection behind the response to a request with two lengths. A proxy may have taken the other one for the body's, and
    what it takes for body would be answered as another request (RFC 9112, 6.1)."""

    async def closing(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return closing
