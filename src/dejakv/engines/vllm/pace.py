"""What computing a row takes in vLLM, seen from its own steps: the scheduler side plans a step, and the worker's report says that
it is over."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dejakv.decide.costs import Costs, Rate

LEAST_TOKENS = 256
"""Tokens of a step that tells it. Fewer take a GPU about as long as one does: it reads all weights either way."""

LEAST_EACH = 8
"""Tokens that such a step has for each of its requests: where most of them decode, their states take the time."""


@dataclass(frozen=True)
class Timed:
    """A step whose time tells what a row takes: when it was planned, by the scheduler's clock, and its tokens."""

    planned: float
    tokens: int


@dataclass
class Pace:
    """Planned and heard in the engine loop; any thread may ask for `costs`."""

    clock: Callable[[], float] = time.monotonic
    _row: Rate | None = None
    _last: float = 0.0

    @property
    def costs(self) -> Costs | None:
        """A row's seconds, the median of the latest steps, and nothing else; None before the first such step."""
        return None if self._row is None else Costs(row=self._row.value)

    def planned(self, output: Any, *, alone: bool) -> Timed | None:
        """A step of vLLM's scheduler, if it will tell what a row takes. `alone`: the worker does nothing beside it that takes long."""
        tokens, requests = output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
        if not alone or output.scheduled_encoder_inputs or tokens < max(LEAST_TOKENS, LEAST_EACH * requests):
            return None
        return Timed(self.clock(), tokens)

    def over(self, step: Timed | None) -> None:
        """A step is over: one that `planned` gave out, or another one (None)."""
        now = self.clock()
        if step is not None:  # asynchronous scheduling plans a step while the one before it runs
            self.seen((now - max(step.planned, self._last)) / step.tokens)
        self._last = now

    def seen(self, row: float) -> None:
        """A step took so many seconds for each of its rows."""
        if self._row is None:
            self._row = Rate(row)
        else:
            self._row.add(row)
