"""uvicorn's HTTP/1.1 protocol with time limits: for headers, for an unread body, and for a client that does not read its
answer. uvicorn itself waits for ever for incomplete headers.
"""

import asyncio
import socket
import struct
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from dejakv.server.settings import ServerSettings

_LINGER_SECONDS = 2.0


class TimedProtocol(H11Protocol):
    """Subclassed by `protocol_of`, which adds the settings."""

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


def protocol_of(settings: ServerSettings) -> type[Any]:
    """The protocol class, of which uvicorn creates an instance for each connection."""
    return type("Protocol", (TimedProtocol,), {"settings": settings})
