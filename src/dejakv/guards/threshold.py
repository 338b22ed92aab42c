"""Is the score high enough? Equal text needs no score."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dejakv.errors import ConfigError
from dejakv.guards.base import Verdict
from dejakv.levels.base import Match
from dejakv.request import Request
from dejakv.store.base import ChunkMeta


@dataclass(frozen=True)
class ThresholdGuard:
    """Accepts a score at or above its level's threshold, rejects one below it.

    thresholds  by the level a match names (`semantic_text`, `embedding:prompt`, ...); any number in [-1, 1], 0 included
    default     for levels that are not named; None: the guard abstains on them

    A request's own threshold can only tighten: the higher of the two counts.
    """

    thresholds: Mapping[str, float] = field(default_factory=dict[str, float])
    default: float | None = None
    name: str = "threshold"
    waived_for_blend: bool = False

    def __post_init__(self) -> None:
        for level, least in {**self.thresholds, "other levels": self.default}.items():
            if least is not None and not -1.0 <= least <= 1.0:
                raise ConfigError(f"the threshold {least} of {level} is no cosine: give a number from -1 to 1")

    def judge(self, request: Request, donor: ChunkMeta, match: Match) -> Verdict:
        if match.level == "exact_text":
            return Verdict("accept", self.name, "equal text")
        least = self.thresholds.get(match.level, self.default)
        if request.threshold is not None:
            least = request.threshold if least is None else max(least, request.threshold)
        if least is None:
            return Verdict("abstain", self.name, f"no threshold is set for {match.level}")
        if match.score >= least:
            return Verdict("accept", self.name, f"score {match.score:.3f} reaches {least:g}")
        return Verdict("reject", self.name, f"score {match.score:.3f} is below {least:g}")

    def observe(self, request: Request, donor: ChunkMeta, match: Match, agreed: bool) -> None:
        """Learns nothing: the threshold is what it was set to."""
