"""The seam of guards: each looks at a request, a donor and their match, and accepts, rejects or abstains; `judge` asks them in a row."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dejakv.decide.levels.base import Match
from dejakv.request import Request
from dejakv.store.base import ChunkMeta

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """A decision, its guard and its reason: the guard's own words and numbers, since the donor's text may be another caller's."""

    decision: Literal["accept", "reject", "abstain"]
    guard: str
    reason: str


class Guard:
    """Base of guards: write `judge`, and `observe` if it learns.

    name              of the guard in verdicts and counts
    waived_for_blend  whether blend and top_layer do without it, since they compute the words that differ
    """

    name: str
    waived_for_blend: bool = False

    def judge(self, request: Request, donor: ChunkMeta, match: Match) -> Verdict:
        """Judges one donor. An exception counts as a rejection, with its kind as the reason."""
        raise NotImplementedError(f"the guard {self.name} needs `judge`: return a Verdict")

    def observe(self, request: Request, donor: ChunkMeta, match: Match, agreed: bool) -> None:
        """Learns whether full computation gave the donor's answer. Does nothing by default. The finder calls it under its lock."""


def judge(guards: Sequence[Guard], request: Request, donor: ChunkMeta, match: Match) -> Verdict:
    """Ask the guards in order and return one verdict. Never raises.

    The first rejection wins, a guard's failure included, whose reason is the kind of its error; else the first acceptance.
    Without either, the donor is rejected.
    """
    accepted: Verdict | None = None
    for guard in guards:
        try:
            verdict = guard.judge(request, donor, match)
        except Exception as error:
            logger.debug("the guard %s failed", guard.name, exc_info=True)  # its message may hold a donor's text
            return Verdict("reject", guard.name, f"the guard failed: {type(error).__name__}")
        if verdict.decision == "reject":
            return verdict
        if verdict.decision == "accept" and accepted is None:
            accepted = verdict
    if accepted is not None:
        return accepted
    reason = "all guards abstained" if guards else "there is no guard that could accept: add a ThresholdGuard"
    return Verdict("reject", "chain", reason)
