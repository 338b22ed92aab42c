"""The socket, bound before the model is loaded, and the uvicorn server on it."""

import socket
from typing import Any

import uvicorn

from dejakv.errors import ConfigError
from dejakv.server.protocol import protocol_of
from dejakv.server.settings import ServerSettings


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
