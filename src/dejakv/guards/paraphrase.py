"""A guard that knows paraphrases: where words differ and nothing vetoes, a cross-encoder says whether two texts mean the same.

The lexical guard takes nearly every paraphrase in general English for another question. A cross-encoder reads both texts at once, and
is far better at it than a comparison of two embeddings.
"""

from collections.abc import Callable

from dejakv.guards.base import Verdict
from dejakv.guards.lexical import LexicalGuard, texts
from dejakv.guards.vetoes import veto
from dejakv.levels.base import Match
from dejakv.request import Request
from dejakv.store.base import ChunkMeta


class ParaphraseGuard:
    """Accepts texts of equal readings; rejects what `vetoes` oppose; of others those below the threshold.

    score      probability that two texts mean the same, in [0, 1]
    threshold  least score, in both directions
    lexical    reads texts; None: nothing is read and nothing vetoed
    """

    name = "paraphrase"
    waived_for_blend = True  # it recomputes what differs, so words may differ

    def __init__(self, score: Callable[[str, str], float], threshold: float, lexical: LexicalGuard | None) -> None:
        self._score = score
        self._threshold = threshold
        self._lexical = lexical

    def judge(self, request: Request, donor: ChunkMeta, match: Match) -> Verdict:
        one, other = texts(request, donor)
        if self._lexical is not None:
            same = self._lexical.judge(request, donor, match)
            if same.decision == "accept":
                return Verdict("accept", self.name, same.reason)
            here, there = self._lexical.reading(request.partition, one), self._lexical.reading(donor.partition, other)
            reason = veto(here, there, one, other)
            if reason:
                return Verdict("reject", self.name, reason)
        score = min(self._score(one, other), self._score(other, one))
        if score >= self._threshold:
            return Verdict("accept", self.name, f"a cross-encoder takes it for a paraphrase ({score:.2f})")
        return Verdict(
            "reject",
            self.name,
            f"a cross-encoder takes it for no paraphrase: {score:.2f}, of {self._threshold:g} at least",
        )

    def observe(self, request: Request, donor: ChunkMeta, match: Match, agreed: bool) -> None:
        """Learns nothing."""

    def forget(self, partition: str | None) -> None:
        """Forgets the readings of one partition's texts, or of all."""
        if self._lexical is not None:
            self._lexical.forget(partition)
