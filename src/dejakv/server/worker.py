"""One thread that owns the model. Requests run one after another; a disconnected client costs nothing more."""

import asyncio
import threading

from dejakv.errors import InputError
from dejakv.metrics import RequestTotals
from dejakv.pictures import before_decoding
from dejakv.pipeline import Answer, Pipeline
from dejakv.request import Request
from dejakv.server.idle import Idle
from dejakv.server.jobs import Cancelled, Job, JobQueue, QueueFullError

_LAST_TOKEN_SECONDS = 5.0


class Worker:
    """Runs jobs on one thread until closed. When none waits, it runs errands (see `Idle`). `promote_after`: seconds."""

    def __init__(self, pipeline: Pipeline, max_queue: int, promote_after: float = 0.0) -> None:
        self.pipeline = pipeline
        self.idle = Idle(pipeline, promote_after)
        self._queue = JobQueue(max_queue)
        self._running: Job | None = None
        self._stopped = 0
        self.served = 0
        self.failed = 0
        self.refused = 0
        self.totals = RequestTotals()
        self._thread = threading.Thread(target=self._work, name="dejakv-engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def cancelled(self) -> int:
        """Requests whose client disconnected, waiting or running."""
        return self._stopped + self._queue.dropped

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._queue.closed

    def submit(self, request: Request) -> Job:
        """Queues a request. Raises QueueFullError at once if there is no room. Call it on the event loop."""
        job = Job(request, asyncio.get_running_loop(), self._queue.drop)
        self._queue.put(job)
        return job

    def close(self, seconds: float) -> None:
        """Finishes queued requests, for at most `seconds`, stops the rest, then finishes the saves."""
        self._queue.close()
        self.pipeline.stop_settling()
        self._thread.join(seconds)
        if self._thread.is_alive():
            for job in self._queue.empty():
                job.put(QueueFullError("the server is shutting down: send the request to another one"))
            if (running := self._running) is not None:
                running.cancel()
            self._thread.join(_LAST_TOKEN_SECONDS)
        if self.pipeline.cache is not None:
            self.pipeline.cache.close()

    def _work(self) -> None:
        while True:
            job = self._queue.get(self.idle.patience)
            if job is None:
                if self._queue.closed:
                    return
                self.idle.run()
                continue
            self.idle.serves(job)
            self._running = job
            try:
                job.put(self._serve(job))
                self.served += 1
            except Cancelled as error:
                self._stopped += 1
                job.put(error)
            except InputError as error:
                self.refused += 1
                job.put(error)
            except Exception as error:
                self.failed += 1
                job.put(error)
            # Not until the next request comes: it holds the prompt.
            self._running = job = None

    def _serve(self, job: Job) -> Answer:
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
            answer = self.pipeline.answer(job.request, on_token=on_token)
        finally:
            before_decoding.reset(token)
        self.totals.add(answer.record)
        return answer
