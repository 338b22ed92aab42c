"""A server that speaks RESP, or something like it, in a thread: it answers every command as it is told to."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self

Command = list[bytes]
Answer = Callable[[Command], Iterable[bytes]]
"""The pieces of an answer. No pieces: silence, and the connection stays open."""
LONGEST_COMMAND = 1 << 20


class FakeRedis:
    """Use it as a context: `url` is where it listens, on this machine alone."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        for connection in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._thread.join(10)

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, StopIteration):
            lines = connection.makefile("rb")
            while not self._stopped.is_set():
                command = next(commands(lines.readline, lines.read))
                for piece in self._answer(command):
                    if self._stopped.is_set():
                        return
                    connection.sendall(piece)


def commands(readline: Callable[[], bytes], read: Callable[[int], bytes]) -> Iterator[Command]:
    """What a client sends: arrays of bulk strings."""
    while line := readline():
        if not line.startswith(b"*"):
            return
        parts: Command = []
        for _ in range(int(line[1:])):
            length = int(readline()[1:])
            parts.append(read(length)[:LONGEST_COMMAND])
            read(2)
        yield parts
