"""Connections to a Redis server that bound the size and the time of an answer: the server may be anybody's.

redis-py's own time-out is that of one read, and it reads as many bytes as an answer says it has.
"""

import time
from typing import Any

SLOWEST = 4 * 1024**2
"""Bytes a second below which an answer is given up: to compute a prompt again is faster."""
BESIDE = 4 * 1024**2
"""Bytes that an answer may have beside a chunk."""


class BoundedSocket:
    """A socket for one question after another. What is not named here is the socket's own.

    largest  bytes that an answer may have; `seconds` until it must have begun
    """

    def __init__(self, inner: Any, largest: int, seconds: float) -> None:
        self._inner = inner
        self._largest = largest
        self._seconds = seconds
        self._begin()

    def sendall(self, data: Any) -> None:
        self._inner.sendall(data)
        self._begin()

    def recv(self, size: int) -> bytes:
        data = self._inner.recv(size)
        self._count(len(data))
        return data

    def recv_into(self, buffer: Any, *more: Any) -> int:
        size = self._inner.recv_into(buffer, *more)
        self._count(size)
        return size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _begin(self) -> None:
        self._received = 0
        self._began = time.monotonic()

    def _count(self, size: int) -> None:
        self._received += size
        if self._received > self._largest:
            raise ConnectionError(f"its answer has more than {self._largest} bytes")
        if time.monotonic() - self._began > self._seconds + self._received / SLOWEST:
            raise TimeoutError(f"its answer took more than {self._seconds:g} seconds, and a second for {SLOWEST} bytes")


def bounded(connection_class: type[Any], largest: int, seconds: float) -> type[Any]:
    """The class of a redis-py connection, over a `BoundedSocket`."""

    base: Any = connection_class

    class Bounded(base):
        def _connect(self) -> BoundedSocket:
            return BoundedSocket(base._connect(self), largest, seconds)

    return Bounded
