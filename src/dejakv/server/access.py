"""Who is asking: API keys are checked before a body is read, and endpoints depend on the caller."""

from collections.abc import MutableMapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import Request as HttpRequest

from dejakv.http.errors import Receive, RefusedError, Scope, Send, refuse
from dejakv.http.keys import ApiKeys, Caller, bearer_key
from dejakv.request import asks_no_store
from dejakv.server.settings import ServerSettings

OPEN = frozenset({"/", "/health", "/ready", "/docs", "/openapi.json"})
"""Paths that need no key; without one they reveal nothing about requests. The files of `/docs` need none either."""

_BEARER = {"WWW-Authenticate": "Bearer"}


def keys_of(settings: ServerSettings) -> ApiKeys:
    """The owner of each key. Raises: ConfigError for invalid keys."""
    file = Path(settings.api_keys_file).expanduser() if settings.api_keys_file is not None else None
    return ApiKeys.load(settings.api_keys, file, settings.partition_secret, settings.operator_key)


class KeyGate:
    """ASGI middleware. It puts the `Caller` into the request's state: nothing in a body identifies the caller."""

    def __init__(self, app: Any, keys: ApiKeys, settings: ServerSettings) -> None:
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
            await refuse(scope, send, error)
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
        caller = self._keys.caller(bearer_key(given[0]) if len(given) == 1 else None)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if caller is None and path not in OPEN and not path.startswith("/docs/"):
            raise RefusedError(401, "missing or unknown API key: send one header 'Authorization: Bearer KEY'", _BEARER)
        return caller


def _closing(send: Send) -> Send:
    """Ends the connection behind the response to a request with two lengths. A proxy may have taken the other one for the body's, and
    what it takes for body would be answered as another request (RFC 9112, 6.1)."""

    async def closing(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return closing


def caller_of(http: HttpRequest) -> Caller:
    """The caller identified by the gate."""
    return http.state.caller


def operator_only(http: HttpRequest) -> None:
    """401 if API keys are required and this is not the operator's."""
    if not caller_of(http).operator:
        raise RefusedError(
            401, "the operator's key is needed: send 'Authorization: Bearer DEJAKV_OPERATOR_KEY'", _BEARER
        )


def _partition(http: HttpRequest) -> str:
    partition = caller_of(http).partition
    if partition is None:
        raise RefusedError(401, "the operator's key has no partition: send one of the API keys", _BEARER)
    return partition


def _no_store(http: HttpRequest) -> bool:
    return asks_no_store(http.headers.getlist("cache-control"))


AnyCaller = Annotated[Caller, Depends(caller_of)]

Partition = Annotated[str, Depends(_partition)]
"""Of the caller's API key. 401 for the operator's, which has none."""

NoStore = Annotated[bool, Depends(_no_store)]
"""Whether the request's headers ask that nothing of it is kept."""
