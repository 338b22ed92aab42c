"""Access to the server: a key is checked before a body is read, a body before it is parsed."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends
from fastapi.routing import APIRoute
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from dejakv.http.asgi import check_lengths, headers_of, linger_before_close, route_path
from dejakv.http.bodies import parse_json, read_body
from dejakv.http.errors import Receive, RefusedError, Scope, Send, refuse
from dejakv.http.keys import ApiCaller, ApiKeys, bearer_key
from dejakv.request import asks_no_store
from dejakv.server.settings import ServerSettings

OPEN = frozenset({"/", "/health", "/ready", "/docs", "/openapi.json"})
"""Paths that need no key; without one they reveal nothing about requests.

The files of `/docs` need none either.
"""

_BEARER = {"WWW-Authenticate": "Bearer"}


def keys_of(settings: ServerSettings) -> ApiKeys:
    """Read the owner of each key from the settings.

    Raises
    ------
    ConfigError
        For invalid keys.
    """
    return ApiKeys.load(
        settings.api_keys, settings.api_keys_file, settings.partition_secret, settings.operator_key
    )


class KeyGate:
    """ASGI middleware that puts the `ApiCaller` of the key into the request's state.

    The header with the key alone identifies the caller.
    """

    def __init__(self, app: Any, keys: ApiKeys) -> None:
        self.app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request without a known key, and pass every other one on."""
        if scope["type"] != "lifespan":
            try:
                check_lengths(scope)
                scope.setdefault("state", {})["caller"] = self._caller(scope)
            except RefusedError as error:
                # Nothing is read of a caller who is unknown.
                await refuse(scope, send, error)
                return

            # The application may refuse while the body still comes: the client gets its answer.
            receive, send = linger_before_close(receive, send)

        await self.app(scope, receive, send)

    def _caller(self, scope: Scope) -> ApiCaller | None:
        authorizations = headers_of(scope, b"authorization")
        # Two headers count as none: a proxy before us may have checked the other one.
        caller = self._keys.caller(
            bearer_key(authorizations[0]) if len(authorizations) == 1 else None
        )
        path = route_path(scope)
        if caller is None and path not in OPEN and not path.startswith("/docs/"):
            raise RefusedError(
                401,
                "missing or unknown API key: send one header 'Authorization: Bearer KEY'",
                _BEARER,
            )

        return caller


class JsonRoute(APIRoute):
    """Route whose body is read within `app.state.limits` and parsed strictly.

    FastAPI checks the fields of the parsed body.
    """

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler behind the reading of the body."""
        answer = super().get_route_handler()

        async def read(http: HttpRequest) -> Response:
            if self.body_field is None:
                return await answer(http)

            try:
                http._body = await read_body(http.scope, http.receive, http.app.state.limits)
                # Where FastAPI looks for it.
                http._json = parse_json(http._body)
            except RefusedError as error:
                # The rest of the body may still be on its way.
                error.headers["Connection"] = "close"
                raise

            return await answer(http)

        return read


def caller_of(http: HttpRequest) -> ApiCaller:
    """Return the caller identified by the gate."""
    return http.state.caller


def operator_only(http: HttpRequest) -> None:
    """Refuse (401) all but the operator, if API keys are required.

    Raises
    ------
    RefusedError
        For every other caller.
    """
    if not caller_of(http).operator:
        raise RefusedError(
            401,
            "the operator's key is needed: send 'Authorization: Bearer DEJAKV_OPERATOR_KEY'",
            _BEARER,
        )


def _partition(http: HttpRequest) -> str:
    partition = caller_of(http).partition
    if partition is None:
        raise RefusedError(
            401, "the operator's key has no partition: send one of the API keys", _BEARER
        )

    return partition


def _no_store(http: HttpRequest) -> bool:
    return asks_no_store(http.headers.getlist("cache-control"))


AnyCaller = Annotated[ApiCaller, Depends(caller_of)]

Partition = Annotated[str, Depends(_partition)]
"""Partition of the caller's API key; 401 for the operator's, which has none."""

NoStore = Annotated[bool, Depends(_no_store)]
"""Whether the request's headers forbid storing anything of it."""
