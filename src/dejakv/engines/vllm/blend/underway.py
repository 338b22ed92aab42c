"""Blends under way, on the scheduler's side: when one begins, and what of a step's budget is left to them.

With several ranks a blend begins when all have fetched what it starts from, and all from the same: their forwards meet in
collectives (`ranks`). A rank that failed costs the blend, on all ranks. Once it has begun only its end or `drop` ends it.
"""

import time
from dataclasses import dataclass, field

from dejakv.engines.vllm.ranks import Answers

LEAST_ROWS = 128
"""Rows of blends that a full step leaves room for, so that they come to an end."""

NOT_ALIKE = "the ranks do not hold the same of the donors' state"
ABANDONED = "the request ended before its blend"


@dataclass
class UnderWay:
    """Used in the engine loop alone.

    ranks      workers that each blend their part of the heads
    timeout_s  a blend that takes longer is dropped
    """

    ranks: int
    timeout_s: float
    _deadlines: dict[str, float] = field(default_factory=dict[str, float])
    _begin: list[str] = field(default_factory=list[str])
    _drop: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        self._heard = Answers[str](self.ranks)

    @property
    def room(self) -> int:
        """Tokens of a step's budget that are to be left to rows of blends."""
        return LEAST_ROWS if self._deadlines else 0

    def ordered(self, request_id: str) -> None:
        self._deadlines[request_id] = time.monotonic() + self.timeout_s

    def fetched(self, request_id: str, mark: str) -> None:
        """A rank has fetched what a blend starts from (`Draft.mark`), or has failed to (empty). One rank alone does not tell."""
        marks = self._heard.add(request_id, mark)
        if marks is None:
            return
        if all(mark == marks[0] != "" for mark in marks):
            self._begin.append(request_id)
        else:
            self._drop[request_id] = NOT_ALIKE

    def abandoned(self, request_id: str) -> None:
        """The request is over. A blend of it that is under way is dropped, since its rows would serve nobody."""
        if request_id in self._deadlines:
            self._drop[request_id] = ABANDONED

    def ended(self, request_id: str) -> None:
        """All ranks said what became of it."""
        self._deadlines.pop(request_id, None)

    def orders(self) -> tuple[list[str], dict[str, str]]:
        """What all ranks are to begin in the step, and what to drop, with the reason."""
        if self.ranks > 1:
            now = time.monotonic()
            for request_id, deadline in self._deadlines.items():
                if now >= deadline:
                    self._drop.setdefault(request_id, f"the load took longer than {self.timeout_s:g} s")
        begin, self._begin = self._begin, []
        drop, self._drop = self._drop, {}
        return begin, drop
