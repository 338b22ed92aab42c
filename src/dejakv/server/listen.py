"""What `dejakv serve` runs: a socket, bound before the model is loaded, uvicorn on it, and an error at the start as one line."""

import socket
from typing import Any

import uvicorn

from dejakv.errors import ConfigError, DejaKVError
from dejakv.server.protocol import protocol_of
from dejakv.server.settings import ServerSettings

_FAILED = "lifespan.startup.failed"


def bound(host: str, port: int) -> socket.socket:
    """A listening socket; early clients wait. Raises ConfigError if the address is unavailable."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error}): stop the server that uses the port, or give another --host or --port"
        ) from error


def address_of(listener: socket.socket) -> str:
    """`http://HOST:PORT` of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_of(app: Any, settings: ServerSettings, **more: Any) -> uvicorn.Server:
    """uvicorn with this server's limits; `more` goes to its configuration."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=protocol_of(settings),
            ws="none",
            h11_max_incomplete_event_size=settings.max_header_bytes,
            timeout_graceful_shutdown=int(settings.shutdown_seconds),
            **more,
        )
    )


class Startup:
    """An ASGI application around another one, whose error at the start is kept and not logged as a traceback. `failure`: the error of DejaKV with which its start ended, if it did."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.failure: DejaKVError | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See the ASGI specification. Errors other than DejaKV's are reported and raised as the inner application does."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        held: list[Any] = []

        async def hold(message: Any) -> None:
            if message["type"] == _FAILED:  # with a traceback as text; which error it was is known once it is raised
                held.append(message)
            else:
                await send(message)

        try:
            await self._app(scope, receive, hold)
        except BaseException as error:
            if held and isinstance(error, DejaKVError):
                self.failure = error
                await send({"type": _FAILED, "message": ""})
                return
            for message in held:
                await send(message)
            raise
