"""What the levels and guards did, counted a partition."""

import threading
from dataclasses import dataclass, field

from dejakv.decide.plan import Decision, Plan


@dataclass
class CacheCounts:
    """Per partition. `hits` by level (prefix apart), `rejections` by guard.

    promotions  approximately answered prompts that were computed exactly in idle time; `unpromoted` could not be
    rows_kept   rows of blended prompts that were handed over to be stored for later blends
    """

    lookups: int = 0
    hits: dict[str, int] = field(default_factory=dict[str, int])
    prefix_hits: int = 0
    rejections: dict[str, int] = field(default_factory=dict[str, int])
    promotions: int = 0
    unpromoted: int = 0
    rows_kept: int = 0

    @property
    def misses(self) -> int:
        """Lookups after which nothing was reused, not even a prefix."""
        return self.lookups - sum(self.hits.values()) - self.prefix_hits

    def add(self, other: "CacheCounts") -> None:
        """Adds another's counts to these."""
        self.lookups += other.lookups
        self.prefix_hits += other.prefix_hits
        self.promotions += other.promotions
        self.unpromoted += other.unpromoted
        self.rows_kept += other.rows_kept
        for mine, theirs in ((self.hits, other.hits), (self.rejections, other.rejections)):
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count


class PartitionCounts:
    """The counts of every partition. Thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[str, CacheCounts] = {}
        self._lock = threading.Lock()

    def decided(self, partition: str, decision: Decision) -> None:
        """Counts one lookup, who rejected what, and what the best plan is going to use: what was found and not used is no hit."""
        plan = decision.plan
        with self._lock:
            counts = self._counts.setdefault(partition, CacheCounts())
            counts.lookups += 1
            counts.prefix_hits += plan.method == "prefix"
            if plan.match is not None:
                counts.hits[plan.match.level] = counts.hits.get(plan.match.level, 0) + 1
            for verdict in decision.found.verdicts:
                if verdict.decision == "reject":
                    counts.rejections[verdict.guard] = counts.rejections.get(verdict.guard, 0) + 1

    def take_back(self, partition: str, plan: Plan) -> None:
        """Forgets a lookup that asked no guard, and its plan: another lookup of the same request stands for it."""
        with self._lock:
            counts = self._counts.setdefault(partition, CacheCounts())
            counts.lookups -= 1
            counts.prefix_hits -= plan.method == "prefix"
            if plan.match is not None:
                counts.hits[plan.match.level] = counts.hits.get(plan.match.level, 0) - 1
                if not counts.hits[plan.match.level]:
                    del counts.hits[plan.match.level]

    def promotion(self, partition: str, done: bool) -> None:
        """Counts a prompt that was to be computed exactly in idle time, and whether it was."""
        with self._lock:
            counts = self._counts.setdefault(partition, CacheCounts())
            counts.promotions += done
            counts.unpromoted += not done

    def kept(self, partition: str, rows: int) -> None:
        """Counts rows of a blended prompt that are kept."""
        with self._lock:
            self._counts.setdefault(partition, CacheCounts()).rows_kept += rows

    def of(self, partition: str | None) -> CacheCounts:
        """A copy of one partition's counts; None sums over all."""
        total = CacheCounts()
        with self._lock:
            for name, counts in self._counts.items():
                if partition in (None, name):
                    total.add(counts)
        return total

    def clear(self, partition: str) -> None:
        """Forgets one partition's counts."""
        with self._lock:
            self._counts.pop(partition, None)
