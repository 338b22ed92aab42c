"""The socket of `dejakv serve`, bound before the model is loaded, and uvicorn on it with time limits: for headers, for an unread
body, and for a client that does not read its answer. uvicorn itself waits for ever for incomplete headers.
"""

import asyncio
import socket
import struct
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dejakv.errors import ConfigError
from dejakv.server.settings import ServerSettings

_LINGER_SECONDS = 2.0


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


def server_of(app: Any, settings: ServerSettings, log_level: str) -> uvicorn.Server:
    """uvicorn with this server's limits."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=type("Protocol", (TimedProtocol,), {"settings": settings}),
            ws="none",
            h11_max_incomplete_event_size=settings.max_header_bytes,
            timeout_graceful_shutdown=int(settings.shutdown_seconds),
            log_level=log_level,
        )
    )


class TimedProtocol(H11Protocol):
    """One connection. Subclassed by `server_of`, which adds the settings."""

    settings: ServerSettings
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            self._drop()
            return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._late, self._unread):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.settings.send_seconds, self._drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _watch(self) -> None:
        """The time starts when the server begins to wait for a request, and ends when its headers are complete."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self._late is not None:
                self._late.cancel()
                self._late = None
        elif self._late is None:
            self._late = self.loop.call_later(self.settings.header_seconds, self._give_up)

    def _give_up(self) -> None:
        self.transport.close()
        self.loop.call_later(_LINGER_SECONDS, self._drop)

    def _drop(self) -> None:
        """Closes without waiting for the client; the kernel drops the unread bytes too."""
        if (connection := self.transport.get_extra_info("socket")) is not None and connection.fileno() >= 0:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()
