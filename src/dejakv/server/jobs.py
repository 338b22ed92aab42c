"""Requests on their way to the model: a job, and the queue of waiting jobs."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from dejakv.errors import DejaKVError
from dejakv.pipeline import Answer
from dejakv.request import Request


class QueueFullError(DejaKVError):
    """The server's queue is full, or it is shutting down."""


class Cancelled(Exception):
    """The client left; raised inside the engine to stop it."""


@dataclass(eq=False)
class Job:
    """A request on its way. `pieces` ends with an Answer or an exception. `left` is called when it is cancelled. `came`: when,
    in seconds of the monotonic clock."""

    request: Request
    loop: asyncio.AbstractEventLoop
    left: Callable[["Job"], object]
    came: float = field(default_factory=time.monotonic)
    pieces: asyncio.Queue[str | Answer | BaseException] = field(default_factory=asyncio.Queue)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Removes it from the queue, or stops it at its next token. Safe at any time."""
        self.cancelled.set()
        self.left(self)

    async def stream(self) -> AsyncIterator[str | Answer]:
        """Pieces of text as they arrive, then the Answer. Raises the request's error."""
        try:
            while True:
                piece = await self.pieces.get()
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
                if isinstance(piece, Answer):
                    return
        finally:
            self.cancel()

    async def answer(self) -> Answer:
        """Waits for the whole answer."""
        async for piece in self.stream():
            if isinstance(piece, Answer):
                return piece
        raise RuntimeError("the worker ended without an answer")

    def put(self, piece: str | Answer | BaseException) -> None:
        """Passes a piece to the event loop, from any thread."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)


class JobQueue:
    """First come, first served, for at most `room` jobs. Thread-safe."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, job: Job) -> None:
        """Raises QueueFullError at once if there is no room."""
        with self._changed:
            if self._closed:
                raise QueueFullError("the server is shutting down: send the request to another one")
            if len(self._waiting) >= self._room:
                raise QueueFullError(f"{self._room} requests are waiting (--max-queue): try again in a moment")
            self._waiting.append(job)
            self._changed.notify()

    def get(self, seconds: float | None = None) -> Job | None:
        """The next job; waits for one, at most so many seconds. None if none came, or the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, seconds)
            return self._waiting.popleft() if self._waiting else None

    def drop(self, job: Job) -> bool:
        """Removes a waiting job, so that its place is free at once. False if it is no longer waiting."""
        with self._changed:
            try:
                self._waiting.remove(job)
            except ValueError:
                return False
            self.dropped += 1
            return True

    def close(self) -> None:
        """Accepts no more jobs; waiting ones are still served."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def empty(self) -> list[Job]:
        """Removes and returns all waiting jobs."""
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.clear()
            self.dropped += len(waiting)
            return waiting
