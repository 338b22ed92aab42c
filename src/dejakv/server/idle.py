"""What the worker does when no request waits: would-be hits are labelled for the error bound, and prompts that were answered
approximately are computed exactly, one at a time."""

import time
from dataclasses import dataclass

from dejakv.pipeline import Pipeline
from dejakv.server.jobs import Job


@dataclass
class HeldUp:
    """Requests that arrived while an errand ran: how many, and the seconds for which they waited for it."""

    requests: int = 0
    seconds: float = 0.0


class Idle:
    """Runs the errands of one pipeline, for the thread that owns the model.

    after  seconds without a request before the first errand: traffic has pauses in which the next request is near
    """

    def __init__(self, pipeline: Pipeline, after: float) -> None:
        self._pipeline = pipeline
        self._after = after
        self._resting = True
        self._ran = (0.0, 0.0)
        self.held_up = HeldUp()

    @property
    def patience(self) -> float | None:
        """Seconds for which the worker is to wait for a request before it calls `run`; None: there is nothing to do."""
        if not self._pipeline.waiting:
            return None
        return self._after if self._resting else 0.0

    def run(self) -> None:
        """Runs one errand."""
        began = time.monotonic()
        self._pipeline.settle_one()
        self._ran = began, time.monotonic()
        self._resting = False

    def serves(self, job: Job) -> None:
        """A request goes before what still waits."""
        self._resting = True
        began, ended = self._ran
        if began <= job.came < ended:
            self.held_up.requests += 1
            self.held_up.seconds += ended - job.came
