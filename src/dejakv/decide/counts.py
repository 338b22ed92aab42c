"""Counters of levels and guards, by partition."""

from collections import Counter, defaultdict
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from dejakv.decide.plan import Decision


@dataclass
class CacheCounts:
    """Counters of a partition.

    Attributes
    ----------
    lookups : int
        Requests that were decided.
    hits : Counter[str]
        Hits by level, without prefix hits.
    prefix_hits : int
        Requests that ran behind an exact prefix.
    rejections : Counter[str]
        Rejected donors by guard.
    promotions : int
        Approximately answered prompts that were computed exactly in idle time.
    unpromoted : int
        Promotions that failed.
    rows_kept : int
        Rows of blended prompts that were queued for storage.
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
        """Lookups without any reuse, not even of a prefix."""
        return self.lookups - self.hits.total() - self.prefix_hits

    def add(self, other: "CacheCounts") -> None:
        """Add other counts to these."""
        # `Counter + Counter` and `int + int` alike, so that new fields need no code here.
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)


class PartitionCounts:
    """Counters of every partition, thread-safe by the finder's lock."""

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._counts: defaultdict[str, CacheCounts] = defaultdict(CacheCounts)
        self._lock = lock

    def count_decision(self, partition: str, decision: Decision) -> None:
        """Count a lookup, its rejections and the best plan's hit; a donor without use is no hit."""
        plan = decision.plans[0]
        rejections = Counter(
            each.guard for each in decision.donor_search.verdicts if each.decision == "reject"
        )
        hits = Counter([plan.match.level] if plan.match is not None else [])
        self.add(partition, CacheCounts(1, hits, int(plan.method == "prefix"), rejections))

    def count_promotion(self, partition: str, done: bool) -> None:
        """Count a promotion, done or failed."""
        self.add(partition, CacheCounts(promotions=int(done), unpromoted=int(not done)))

    def add(self, partition: str, counts: CacheCounts) -> None:
        """Add to a partition's counts."""
        with self._lock:
            self._counts[partition].add(counts)

    def for_partition(self, partition: str | None) -> CacheCounts:
        """Return a copy of a partition's counts; None sums over all."""
        total = CacheCounts()
        with self._lock:
            for name, counts in self._counts.items():
                if partition in (None, name):
                    total.add(counts)
        return total

    def clear(self, partition: str) -> None:
        """Forget a partition's counts."""
        with self._lock:
            self._counts.pop(partition, None)
