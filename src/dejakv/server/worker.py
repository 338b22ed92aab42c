"""One thread that owns the model, and the queue before it.

Requests run one after another; who comes to a full queue is told to come again, and who leaves is dropped, also in the
middle of an answer.
"""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from dejakv.errors import DejaKVError, InputError
from dejakv.metrics import RequestTotals
from dejakv.pipeline import Answer, Pipeline
from dejakv.request import Request


class QueueFullError(DejaKVError):
    """The server has as many requests waiting as it accepts."""


class Cancelled(Exception):
    """The client left; raised inside the engine to stop it."""


@dataclass
class Job:
    """A request on its way. `pieces` ends with an Answer or an exception."""

    request: Request
    loop: asyncio.AbstractEventLoop
    no_store: bool = False
    pieces: asyncio.Queue[str | Answer | BaseException] = field(default_factory=asyncio.Queue)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Asks the worker to drop it. Safe at any time."""
        self.cancelled.set()

    async def stream(self) -> AsyncIterator[str | Answer]:
        """Pieces of text as they come, then the Answer. Raises what the request failed with."""
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

    def _put(self, piece: str | Answer | BaseException) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)


class Worker:
    """Runs jobs on one thread until closed."""

    def __init__(self, pipeline: Pipeline, max_queue: int) -> None:
        self.pipeline = pipeline
        self._queue: queue.Queue[Job | None] = queue.Queue(max_queue)
        self._closed = False
        self.served = 0
        self.cancelled = 0
        self.failed = 0
        self.refused = 0
        self.totals = RequestTotals()
        self._thread = threading.Thread(target=self._work, name="dejakv-engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    def submit(self, request: Request, *, no_store: bool = False) -> Job:
        """Queues a request. Raises QueueFullError at once if there is no room. Call it on the event loop."""
        job = Job(request, asyncio.get_running_loop(), no_store)
        if self._closed:
            raise QueueFullError("the server is shutting down: ask another one")
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            raise QueueFullError(
                f"{self._queue.maxsize} requests are waiting already: come again in a moment"
            ) from None
        return job

    def close(self, seconds: float) -> None:
        """Finishes what is queued, for at most `seconds`, then the saves."""
        self._closed = True
        until = time.monotonic() + seconds
        try:
            self._queue.put(None, timeout=seconds)
        except queue.Full:
            self._drop_waiting()
            self._queue.put(None)
        self._thread.join(max(0.1, until - time.monotonic()))
        if self.pipeline.cache is not None:
            self.pipeline.cache.close()

    def _drop_waiting(self) -> None:
        while True:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                job.cancel()
                job._put(QueueFullError("the server is shutting down: ask another one"))

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if job.cancelled.is_set():
                self.cancelled += 1
                continue
            try:
                job._put(self._serve(job))
                self.served += 1
            except Cancelled as error:
                self.cancelled += 1
                job._put(error)
            except InputError as error:
                self.refused += 1
                job._put(error)
            except Exception as error:
                self.failed += 1
                job._put(error)

    def _serve(self, job: Job) -> Answer:
        def on_token(_token: int, text: str) -> None:
            if job.cancelled.is_set():
                raise Cancelled
            if text:
                job._put(text)

        answer = self.pipeline.answer(job.request, on_token=on_token, no_store=job.no_store)
        self.totals.add(answer.record)
        return answer
