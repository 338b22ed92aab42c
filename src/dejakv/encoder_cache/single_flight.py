"""One encoder run in progress and its waiting callers, threads as well as asyncio tasks.

A flight ends in one of three ways:
- it lands: all callers get the output;
- its encoder raises: all waiting callers get the error (N callers do not try a failing encoder N times in a row), and
  the next caller tries again;
- it is abandoned, because the leader was interrupted or cancelled, which is not the picture's fault: the waiting callers
  start again and one of them leads.
"""

import asyncio
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeout
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from dejakv.encoder_cache.block import VisualEmbeddingBlock
from dejakv.encoder_cache.eviction import Key
from dejakv.errors import InputError

_STRANDED_CHECK_S = 1.0


class Abandoned(Exception):
    """The encoder's result is unknown: start again."""


class Flight:
    """An encoder run for one key. `discard`: its output must not be kept (its request asked for that, or the cache was cleared)."""

    def __init__(self, key: Key, *, discard: bool = False) -> None:
        self.key = key
        self.discard = discard
        self._future: Future[VisualEmbeddingBlock] = Future()
        self._thread = threading.get_ident()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def led_by(self, task: asyncio.Task[Any]) -> None:
        """Keeps a reference to the task that runs the encoder, so that it is not collected."""
        self._loop, self._task = task.get_loop(), task

    def land(self, block: VisualEmbeddingBlock) -> None:
        self._future.set_result(block)

    def fail(self, error: Exception) -> None:
        self._future.set_exception(error)

    def abandon(self) -> None:
        """Lets the waiting callers start again; does nothing if the flight is over."""
        if not self._future.done():
            self._future.set_exception(Abandoned())

    @property
    def stranded(self) -> bool:
        """Whether it can never land, because the event loop of its encoder was closed."""
        return self._loop is not None and self._loop.is_closed() and not self._future.done()

    def wait(self) -> VisualEmbeddingBlock:
        """Blocks until the flight is over; returns its output or raises its error."""
        if self._loop is None:
            return self._future.result()
        if self._thread == threading.get_ident() and not self._future.done():
            raise InputError(
                "this thread's event loop is running the encoder for this picture and would wait for itself: "
                "use `await view.aget_or_compute(...)` here"
            )
        while True:
            with suppress(WaitTimeout):
                return self._future.result(_STRANDED_CHECK_S)
            if self.stranded:
                raise Abandoned

    async def arrival(self) -> VisualEmbeddingBlock:
        """The same for a task. Cancelling the task ends only its own waiting."""
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not mine.done():
                mine.set_result(None)

        def over(_: object) -> None:
            with suppress(RuntimeError):  # this waiter's loop was closed in the meantime
                loop.call_soon_threadsafe(wake)

        self._future.add_done_callback(over)
        await mine
        return self._future.result()


leading: ContextVar[tuple[Flight, ...]] = ContextVar("leading", default=())
"""The flights whose encoder is running in this context, to detect an encoder that asks for its own output."""


def check_not_leading(flight: Flight) -> None:
    """Raises InputError if the caller would wait for itself."""
    if flight in leading.get():
        raise InputError(
            "`compute` asked the cache for the very picture it was called for and would wait for itself: "
            "call the encoder in it, not the cache"
        )
