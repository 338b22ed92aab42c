"""Guards in a row: the first that rejects decides, and somebody must accept."""

import logging
from collections.abc import Sequence

from dejakv.guards.base import Guard, Verdict
from dejakv.levels.base import Match
from dejakv.request import Request
from dejakv.store.base import ChunkMeta

logger = logging.getLogger(__name__)


def judge(guards: Sequence[Guard], request: Request, donor: ChunkMeta, match: Match) -> Verdict:
    """What the guards say together. Never raises.

    The first rejection ends it. A guard that raises has rejected, with the kind of the error as its reason. If nobody rejects, the
    first that accepted speaks for all; if all abstain, or there are none, nobody has vouched for the donor: a rejection.
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


def observe(guards: Sequence[Guard], request: Request, donor: ChunkMeta, match: Match, agreed: bool) -> None:
    """Tells every guard whether full computation gave the donor's answer."""
    for guard in guards:
        guard.observe(request, donor, match, agreed)
