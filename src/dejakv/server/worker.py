"""One thread that owns the model, and the queue before it. Requests run one after another; a disconnected client costs nothing more."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from dejakv.errors import InputError
from dejakv.http.errors import ClientGoneError, RefusedError
from dejakv.metrics import RequestTotals
from dejakv.pictures import before_decoding
from dejakv.pipeline import Answer, Pipeline
from dejakv.request import Request

_LAST_TOKEN_SECONDS = 5.0
_CLOSING = "the server is shutting down: send the request to another one"


class Cancelled(Exception):
    """Stops the engine: the client left. No DejaKVError, which an engine may answer with another plan."""


@dataclass(eq=False)
class Job:
    """A request on its way. `pieces` ends with an Answer or an exception."""

    request: Request
    loop: asyncio.AbstractEventLoop
    leave: Callable[["Job"], object]
    came: float = field(default_factory=time.monotonic)
    pieces: asyncio.Queue[str | Answer | BaseException] = field(default_factory=asyncio.Queue)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Removes it from the queue, or stops it at its next token. Safe at any time."""
        self.cancelled.set()
        self.leave(self)

    async def stream(self) -> AsyncIterator[str | Answer]:
        """Yields pieces of text as they arrive, then the Answer. Raises the request's error."""
        try:
            piece: str | Answer | BaseException = ""
            while not isinstance(piece, Answer):
                piece = await self.pieces.get()
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            self.cancel()

    async def answer(self) -> Answer:
        """Waits for the whole answer."""
        return [piece async for piece in self.stream() if isinstance(piece, Answer)].pop()

    def put(self, piece: str | Answer | BaseException) -> None:
        """Passes a piece to the event loop, from any thread."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)


class RequestWorker:
    """Runs jobs on one thread until closed, first come, first served. When none waits, it settles prompts one at a time.

    max_queue      requests that may wait
    promote_after  seconds without a request before the first prompt is settled: traffic has pauses in which the next request is near
    """

    def __init__(self, pipeline: Pipeline, max_queue: int, promote_after: float = 0.0) -> None:
        self.pipeline = pipeline
        self.served = self.failed = self.refused = self.cancelled = 0
        self.held_up, self.held_up_seconds = 0, 0.0
        """Requests that arrived while a prompt was settled, and the seconds for which they waited for it."""
        self.totals = RequestTotals()
        self._max_queue, self._promote_after = max_queue, promote_after
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._running: Job | None = None
        self._thread = threading.Thread(target=self._work, name="dejakv-engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    def submit(self, request: Request) -> Job:
        """Queues a request. Raises RefusedError (429) at once if there is no room. Call it on the event loop."""
        job = Job(request, asyncio.get_running_loop(), self._drop)
        with self._changed:
            if self._closed:
                raise RefusedError(429, _CLOSING)
            if len(self._waiting) >= self._max_queue:
                raise RefusedError(429, f"{self._max_queue} requests are waiting (--max-queue): try again in a moment")
            self._waiting.append(job)
            self._changed.notify()
        return job

    def close(self, seconds: float) -> None:
        """Finishes queued requests, for at most `seconds`, stops the rest, then finishes the saves."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.pipeline.stop_settling()
        self._thread.join(seconds)
        if self._thread.is_alive():
            for job in list(self._waiting):
                if self._drop(job):
                    job.put(RefusedError(429, _CLOSING))
            if (running := self._running) is not None:
                running.cancel()
            self._thread.join(_LAST_TOKEN_SECONDS)
        if self.pipeline.cache is not None:
            self.pipeline.cache.close()

    def _drop(self, job: Job) -> bool:
        """Removes a waiting job, so that its place is free at once."""
        with self._changed:
            if found := job in self._waiting:
                self._waiting.remove(job)
                self.cancelled += 1
            return found

    def _next(self, seconds: float | None) -> Job | None:
        """The next job; waits for one, at most so many seconds. None if none came, or the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, seconds)
            self._running = self._waiting.popleft() if self._waiting else None
            return self._running

    def _work(self) -> None:
        pause = self._promote_after
        began = ended = 0.0
        while True:
            job = self._next(pause if self.pipeline.waiting else None)
            if job is not None:
                pause = self._promote_after
                if began <= job.came < ended:
                    self.held_up += 1
                    self.held_up_seconds += ended - job.came
                self._serve(job)
                self._running = job = None  # at once: it holds the prompt
            elif self._closed:
                return
            else:
                pause, began = 0.0, time.monotonic()
                self.pipeline.settle_one()
                ended = time.monotonic()

    def _serve(self, job: Job) -> None:
        try:
            answer = self._answer(job)
            self.totals.add(answer.record)
            self.served += 1
            job.put(answer)
        except Cancelled:
            with self._changed:
                self.cancelled += 1
            job.put(ClientGoneError())
        except InputError as error:
            self.refused += 1
            job.put(error)
        except Exception as error:
            self.failed += 1
            job.put(error)

    def _answer(self, job: Job) -> Answer:
        def go_on() -> None:
            if job.cancelled.is_set():
                raise Cancelled

        def on_token(_token: int, text: str) -> None:
            go_on()
            if text:
                job.put(text)

        go_on()
        token = before_decoding.set(go_on)
        try:
            return self.pipeline.answer(job.request, on_token=on_token)
        finally:
            before_decoding.reset(token)
