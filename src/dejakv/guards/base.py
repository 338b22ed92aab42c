"""The seam of a guard: it looks at a request, a donor and how they matched, and accepts, rejects or abstains."""

from dataclasses import dataclass
from typing import Literal, Protocol

from dejakv.levels.base import Match
from dejakv.request import Request
from dejakv.store.base import ChunkMeta

Decision = Literal["accept", "reject", "abstain"]


@dataclass(frozen=True)
class Verdict:
    """A decision, who made it and why: in words of the guard's own and numbers, since the donor's text may be another caller's."""

    decision: Decision
    guard: str
    reason: str


class Guard(Protocol):
    """`observe` hands back what full computation would have said, for guards that learn; most ignore it.

    A guard that raises counts as a rejection with the kind of the error as its reason.
    """

    @property
    def name(self) -> str: ...

    @property
    def waived_for_blend(self) -> bool:
        """Whether blend and top_layer may do without it: a guard of words, since they compute the words that differ."""
        ...

    def judge(self, request: Request, donor: ChunkMeta, match: Match) -> Verdict: ...

    def observe(self, request: Request, donor: ChunkMeta, match: Match, agreed: bool) -> None: ...
