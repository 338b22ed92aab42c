"""With `--media similar` another picture may do, but only if the vision layer has looked at both."""

from dejakv.guards.base import Verdict
from dejakv.guards.media import media_of
from dejakv.levels.base import Match
from dejakv.request import Request
from dejakv.store.base import ChunkMeta


class VisionGuard:
    """Rejects a donor with other media that was not found by a combination which the vision layer took part in.

    least  the vision layer's own threshold, a cosine in [-1, 1]
    """

    name = "vision"
    waived_for_blend = False

    def __init__(self, least: float) -> None:
        self.least = least

    def judge(self, request: Request, donor: ChunkMeta, match: Match) -> Verdict:
        here, there = media_of(request, donor)
        if here == there:
            return Verdict("abstain", self.name, "the same media")
        score = match.layers.get("vision")
        if score is None:
            return Verdict("reject", self.name, f"other media, and {match.level} has not compared them")
        if score < self.least:
            return Verdict("reject", self.name, f"other media, and their cosine {score:.3f} is below {self.least:g}")
        return Verdict("abstain", self.name, f"other media that look alike ({score:.3f})")

    def observe(self, request: Request, donor: ChunkMeta, match: Match, agreed: bool) -> None:
        """Learns nothing."""
