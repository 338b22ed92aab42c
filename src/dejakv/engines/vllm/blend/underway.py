"""Blends under way, on the scheduler's side: when one begins, and how many rows are still to come.

With several ranks a blend begins when all have fetched what it starts from, and all from the same: their forwards meet in
collectives (`ranks`). A rank that failed costs the blend, on all ranks. Once it has begun only its end or `drop` ends it.
"""

from dataclasses import dataclass, field

from dejakv.engines.vllm.ranks import Answers

NOT_ALIKE = "the ranks do not hold the same of the donors' state"
ABANDONED = "the request ended before its blend"


@dataclass
class UnderWay:
    """The blends under way and their remaining rows. For the engine loop alone.

    ranks  workers that each blend their part of the heads
    rows   rows left in each blend; 0 until all ranks have fetched its draft
    """

    ranks: int
    rows: dict[str, int] = field(default_factory=dict[str, int])
    _begin: list[str] = field(default_factory=list[str])
    _drop: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        self._heard = Answers[str](self.ranks)

    def ordered(self, request_id: str) -> None:
        self.rows[request_id] = 0

    def remain(self, rows: dict[str, int]) -> None:
        """Note a rank's report of the rows left in these blends, whose drafts it has fetched."""
        for request_id, count in rows.items():
            if request_id in self.rows and (self.ranks == 1 or self.rows[request_id]):
                self.rows[request_id] = count

    def fetched(self, request_id: str, mark: str) -> None:
        """Note that a rank has fetched a blend's draft (`Draft.mark`), or has failed to (empty). A single rank does not tell."""
        marks = self._heard.add(request_id, mark)
        if marks is None:
            return
        if all(mark == marks[0] != "" for mark in marks):
            self._begin.append(request_id)
            self.rows[request_id] = 1  # at least
        else:
            self._drop[request_id] = NOT_ALIKE

    def abandoned(self, request_id: str) -> None:
        """Drop the blend of a finished request, whose rows would serve nobody."""
        if request_id in self.rows:
            self._drop[request_id] = ABANDONED

    def ended(self, request_id: str) -> None:
        """Forget a blend that all ranks have reported as over."""
        self.rows.pop(request_id, None)

    def orders(self) -> tuple[list[str], dict[str, str]]:
        """Requests for all ranks to begin in the step, and those to drop, with the reason."""
        begin, self._begin = self._begin, []
        drop, self._drop = self._drop, {}
        return begin, drop
