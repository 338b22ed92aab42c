"""The thread that owns the model, and the queue before it.

Requests run one after another; a disconnected client costs nothing more.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

from dejakv import tracing
from dejakv.errors import InputError
from dejakv.http.errors import ClientGoneError, RefusedError
from dejakv.metrics import RequestTotals
from dejakv.pictures import before_decoding
from dejakv.pipeline import Answer, Pipeline
from dejakv.request import Request
from dejakv.server.logprobs import token_logprobs

_LAST_TOKEN_SECONDS = 5.0
_CLOSING = "the server is shutting down: send the request to another one"


class RequestCancelled(Exception):
    """Departure of the client, which stops the engine.

    It is no DejaKVError, which an engine may answer with another plan.
    """


@dataclass(eq=False)
class ServerJob:
    """Request on its way through the worker.

    Attributes
    ----------
    loop : asyncio.AbstractEventLoop
        Event loop of the request.
    leave : Callable
        Takes the job out of the worker's queue.
    pieces : asyncio.Queue
        Pieces of text; the last item is an Answer or an exception.
    cancelled : bool
        Whether the client left.
    trace : Handover or None
        Trace of the request; None where traces are off.
    top_tokens : int or None
        Likeliest tokens at each place, with log probabilities in the completion's
        `details["logprobs"]`; None: no log probabilities.
    """

    loop: asyncio.AbstractEventLoop
    leave: Callable[["ServerJob"], object]
    pieces: asyncio.Queue[str | Answer | BaseException] = field(default_factory=asyncio.Queue)
    cancelled: bool = False
    trace: tracing.Handover | None = None
    top_tokens: int | None = None

    def cancel(self) -> None:
        """Remove the job from the queue, or stop it at its next token. Safe at any time."""
        self.cancelled = True
        self.leave(self)

    async def stream(self) -> AsyncIterator[str | Answer]:
        """Yield pieces of text as they arrive, then the Answer. The request's error is raised.

        A caller that leaves the iterator cancels the job.
        """
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
        """Wait for the whole answer and return it; the request's error is raised."""
        return [piece async for piece in self.stream() if isinstance(piece, Answer)].pop()

    def check(self) -> None:
        """Raise RequestCancelled if the client left."""
        if self.cancelled:
            raise RequestCancelled

    def put(self, piece: str | Answer | BaseException) -> None:
        """Pass a piece to the event loop, from any thread."""
        if not self.loop.is_closed():
            # An asyncio queue is not thread-safe, and a worker calls this from its own.
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)


class RequestWorker:
    """Thread that runs jobs until it is closed, and settles prompts while none waits.

    The next job is of the partition whose last turn is longest ago, and among its jobs the first
    that came. So nobody's many requests make another client wait for more than one of them.

    Parameters
    ----------
    pipeline : Pipeline
        Engine and cache that answer the requests.
    max_queue : int
        Requests that may wait.
    promote_after : float
        Seconds without a request before the first prompt is settled: traffic has pauses in which
        the next request is near.
    """

    def __init__(self, pipeline: Pipeline, max_queue: int, promote_after: float = 0.0) -> None:
        self.pipeline = pipeline
        # Counted on the worker's thread alone, so that no lock is needed.
        self._served = self._refused = self._failed = self._stopped = 0
        # Counted on the event loop alone.
        self._cancelled_waiting = 0
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
        """Number of requests in the queue."""
        return len(self._waiting)

    @property
    def outcomes(self) -> dict[str, int]:
        """Numbers of requests by how they ended: `served`, `refused`, `cancelled`, `failed`.

        `refused` are those with an InputError. A full queue is not counted.
        """
        cancelled = self._cancelled_waiting + self._stopped
        return {
            "served": self._served,
            "refused": self._refused,
            "cancelled": cancelled,
            "failed": self._failed,
        }

    @property
    def alive(self) -> bool:
        """Whether the worker takes requests."""
        return self._thread.is_alive() and not self._closed

    def submit(self, request: Request, top_tokens: int | None = None) -> ServerJob:
        """Queue a request. Call this method on the event loop.

        Raises
        ------
        RefusedError
            With 429, if there is no room in the queue or the server shuts down.
        """
        if self._closed:
            raise RefusedError(429, _CLOSING)
        if len(self._waiting) >= self._max_queue:
            raise RefusedError(
                429, f"{self._max_queue} requests are waiting (--max-queue): try again in a moment"
            )

        trace = tracing.hand_over()
        loop = asyncio.get_running_loop()
        job = ServerJob(loop, self._withdraw, trace=trace, top_tokens=top_tokens)
        # Before the call: the worker may look for the job at once.
        self._waiting[job] = request
        self._calls.put(True)
        return job

    def close(self, seconds: float) -> None:
        """Finish queued requests, for at most `seconds`, stop the rest, then finish the saves."""
        self._closed = True
        # Behind the jobs that came before, so that these are served first.
        self._calls.put(False)
        self.pipeline.stop_settling()
        self._thread.join(seconds)

        for job in list(self._waiting):
            if self._withdraw(job):
                job.put(RefusedError(429, _CLOSING))
        # It took longer than it may: its next token ends it.
        if (running := self._running) is not None:
            running.cancel()
            self._thread.join(_LAST_TOKEN_SECONDS)
        if self.pipeline.cache is not None:
            self.pipeline.cache.close()

    def _withdraw(self, job: ServerJob) -> bool:
        """Take a job out of the queue, and return whether it was there.

        Its place and its prompt are free at once.
        """
        was_waiting = self._waiting.pop(job, None) is not None
        self._cancelled_waiting += was_waiting
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

            # At once, because they hold the prompt in memory.
            self._running = job = request = None

    def _next(self) -> ServerJob | None:
        """Return the job whose turn it is; None if all that waited have left."""
        # In one step: the event loop adds and removes meanwhile.
        waiting = self._waiting.copy()
        return min(
            waiting, key=lambda job: self._turns.get(waiting[job].partition, 0), default=None
        )

    def _serve(self, job: ServerJob, request: Request) -> None:
        try:
            with tracing.taken_over(job.trace, "dejakv.queue"):
                answer = self._answer(job, request)
                if job.top_tokens is not None:
                    if answer.record.answer == "stored":
                        # Nothing ran, so that no state is there to score it from.
                        answer = self._answer(job, replace(request, reuse="off"))
                    answer = self._scored(job, answer, job.top_tokens)
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

    def _scored(self, job: ServerJob, answer: Answer, top_tokens: int) -> Answer:
        engine: Any = self.pipeline.engine
        details = {
            **answer.completion.details,
            "logprobs": token_logprobs(answer, top_tokens, engine.tokenizer, job.check),
        }
        return replace(answer, completion=replace(answer.completion, details=details))

    def _answer(self, job: ServerJob, request: Request) -> Answer:
        def on_token(_token: int, text: str) -> None:
            job.check()
            if text:
                job.put(text)

        job.check()
        # Pictures are decoded before any token, and a client may leave meanwhile.
        token = before_decoding.set(job.check)
        try:
            return self.pipeline.answer(request, on_token=on_token)
        finally:
            before_decoding.reset(token)
