"""What the levels and guards did, counted a partition."""

from collections import Counter, defaultdict
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from dejakv.decide.plan import Decision


@dataclass
class CacheCounts:
    """Per partition. `hits` by level (prefix apart), `rejections` by guard.

    promotions  approximately answered prompts that were computed exactly in idle time; `unpromoted` could not be
    rows_kept   rows of blended prompts that were handed over to be stored for later blends
    """

    lookups: int = 0
    hits: Counter[str] = field(default_factory=Counter[str])
    prefix_hits: int = 0
    rejections: Counter[str] = field(default_factory=Counter[str])
    promotions: int = 0
    unpromoted: int = 0
    rows_kept: int = 0

    @property
    def misses(self) -> int:
        """Lookups after which nothing was reused, not even a prefix."""
        return self.lookups - self.hits.total() - self.prefix_hits

    def add(self, other: "CacheCounts") -> None:
        """Adds another's counts to these."""
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)


class PartitionCounts:
    """The counts of every partition. Thread-safe by the finder's lock."""

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._counts: defaultdict[str, CacheCounts] = defaultdict(CacheCounts)
        self._lock = lock

    def decided(self, partition: str, decision: Decision) -> None:
        """Counts one lookup, who rejected what, and what the best plan is going to use: what was found and not used is no hit."""
        plan = decision.plans[0]
        rejections = Counter(each.guard for each in decision.found.verdicts if each.decision == "reject")
        hits = Counter([plan.match.level] if plan.match is not None else [])
        self.add(partition, CacheCounts(1, hits, int(plan.method == "prefix"), rejections))

    def promotion(self, partition: str, done: bool) -> None:
        """Counts a prompt that was to be computed exactly in idle time, and whether it was."""
        self.add(partition, CacheCounts(promotions=int(done), unpromoted=int(not done)))

    def add(self, partition: str, counts: CacheCounts) -> None:
        """Adds to a partition's counts."""
        with self._lock:
            self._counts[partition].add(counts)

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
