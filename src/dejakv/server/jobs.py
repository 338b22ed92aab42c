"""One thread that owns the model, and the queue before it. Requests run one after another; a disconnected client costs nothing more."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue

from dejakv.errors import InputError
from dejakv.http.errors import ClientGoneError, RefusedError
from dejakv.metrics import RequestTotals
from dejakv.pictures import before_decoding
from dejakv.pipeline import Answer, Pipeline
from dejakv.request import Request

_LAST_TOKEN_SECONDS = 5.0
_CLOSING = "the server is shutting down: send the request to another one"


class RequestCancelled(Exception):
    """Stops the engine: the client left. No DejaKVError, which an engine may answer with another plan."""


@dataclass(eq=False)
class ServerJob:
    """A request on its way. `pieces` ends with an Answer or an exception."""

    loop: asyncio.AbstractEventLoop
    leave: Callable[["ServerJob"], object]
    pieces: asyncio.Queue[str | Answer | BaseException] = field(default_factory=asyncio.Queue)
    cancelled: bool = False

    def cancel(self) -> None:
        """Removes it from the queue, or stops it at its next token. Safe at any time."""
        self.cancelled = True
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
            # An asyncio queue is not thread-safe, and a worker calls this from its own.
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)


class RequestWorker:
    """Runs jobs on one thread until closed: of the partition whose last turn is longest ago, first come, first served, so that nobody's
    many requests make another wait for more than one of them. When none waits, it settles prompts one at a time.

    max_queue      requests that may wait
    promote_after  seconds without a request before the first prompt is settled: traffic has pauses in which the next request is near
    """

    def __init__(self, pipeline: Pipeline, max_queue: int, promote_after: float = 0.0) -> None:
        self.pipeline = pipeline
        self._served = self._refused = self._failed = self._stopped = 0  # on the worker's thread
        self._left = 0  # on the event loop
        self.totals = RequestTotals()
        self._max_queue, self._promote_after = max_queue, promote_after
        self._calls: SimpleQueue[bool] = SimpleQueue()
        """True for each job that came, False for the end."""
        self._waiting: dict[ServerJob, Request] = {}
        """Requests of jobs in the queue. `pop` gives each job to one thread alone."""
        self._begun = count(1)
        self._turns: dict[str, int] = {}
        """Of each partition, how many jobs had begun when its last one did."""
        self._closed = False
        self._running: ServerJob | None = None

        self._thread = threading.Thread(target=self._work, name="dejakv-engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def outcomes(self) -> dict[str, int]:
        """Requests by how they ended."""
        cancelled = self._left + self._stopped
        return {"served": self._served, "refused": self._refused, "cancelled": cancelled, "failed": self._failed}

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    def submit(self, request: Request) -> ServerJob:
        """Queues a request. Raises RefusedError (429) at once if there is no room. Call it on the event loop."""
        if self._closed:
            raise RefusedError(429, _CLOSING)
        if len(self._waiting) >= self._max_queue:
            raise RefusedError(429, f"{self._max_queue} requests are waiting (--max-queue): try again in a moment")

        job = ServerJob(asyncio.get_running_loop(), self._leave)
        # Before the call: the worker may look for the job at once.
        self._waiting[job] = request
        self._calls.put(True)
        return job

    def close(self, seconds: float) -> None:
        """Finishes queued requests, for at most `seconds`, stops the rest, then finishes the saves."""
        self._closed = True
        # Behind the jobs that came before, so that these are served first.
        self._calls.put(False)
        self.pipeline.stop_settling()
        self._thread.join(seconds)

        for job in list(self._waiting):
            if self._leave(job):
                job.put(RefusedError(429, _CLOSING))
        # It took longer than it may: its next token ends it.
        if (running := self._running) is not None:
            running.cancel()
            self._thread.join(_LAST_TOKEN_SECONDS)
        if self.pipeline.cache is not None:
            self.pipeline.cache.close()

    def _leave(self, job: ServerJob) -> bool:
        """Takes a job out of the queue: its place and its prompt are free at once. False if it does not wait any more."""
        was_waiting = self._waiting.pop(job, None) is not None
        self._left += was_waiting
        return was_waiting

    def _work(self) -> None:
        pause = self._promote_after
        while True:
            try:
                # Wakes up without a call only if a prompt waits to be settled.
                came = self._calls.get(timeout=pause if self.pipeline.waiting else None)
            except Empty:
                self.pipeline.settle_one()
                # Still no request: the next prompt is settled at once.
                pause = 0.0
                continue

            if not came:
                return
            # Before it leaves the queue, so that `close` always finds it in one of the two.
            job = self._running = self._next()
            # pop decides a race: a client that leaves at this moment may have taken it.
            if job is not None and (request := self._waiting.pop(job, None)) is not None:
                self._turns[request.partition] = next(self._begun)
                pause = self._promote_after
                self._serve(job, request)
            self._running = job = request = None  # at once: it holds the prompt

    def _next(self) -> ServerJob | None:
        """The job whose turn it is; None if all that waited have left."""
        waiting = self._waiting.copy()  # in one step: the event loop adds and removes meanwhile
        return min(waiting, key=lambda job: self._turns.get(waiting[job].partition, 0), default=None)

    def _serve(self, job: ServerJob, request: Request) -> None:
        try:
            answer = self._answer(job, request)
            self.totals.add(answer.record)
            self._served += 1
            job.put(answer)
        except RequestCancelled:
            self._stopped += 1
            job.put(ClientGoneError())
        except InputError as error:
            self._refused += 1
            job.put(error)
        except Exception as error:
            self._failed += 1
            job.put(error)

    def _answer(self, job: ServerJob, request: Request) -> Answer:
        def go_on() -> None:
            if job.cancelled:
                raise RequestCancelled

        def on_token(_token: int, text: str) -> None:
            go_on()
            if text:
                job.put(text)

        go_on()
        # Pictures are decoded before any token, and a client may leave meanwhile.
        token = before_decoding.set(go_on)
        try:
            return self.pipeline.answer(request, on_token=on_token)
        finally:
            before_decoding.reset(token)
