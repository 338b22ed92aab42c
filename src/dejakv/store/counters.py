"""Common to all stores: statistics by partition, and listeners for entries that left."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dejakv.store.base import StoreStats

logger = logging.getLogger("dejakv.store")

FAILED_WRITES = {
    "full": "the disk is full",
    "read_only": "the folder cannot be written",
    "error": "the disk reported an error",
}
"""Reasons of refusals that are failures of the disk, in words."""


def _counter() -> Counter[str]:
    return Counter()


@dataclass
class _Counts:
    hits: int = 0
    misses: int = 0
    puts: int = 0
    corrupt: int = 0
    refused: Counter[str] = field(default_factory=_counter)
    evictions: Counter[str] = field(default_factory=_counter)


class Counters:
    """Thread-safe. A miss for an unknown id belongs to no partition: it counts only in the total (`partition=None`).

    lock  the store's; not held by who counts
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._total = _Counts()
        self._by_partition: dict[str, _Counts] = {}

    def hit(self, partition: str) -> None:
        with self._lock:
            for counts in self._both(partition):
                counts.hits += 1

    def miss(self, partition: str | None = None) -> None:
        with self._lock:
            for counts in self._both(partition):
                counts.misses += 1

    def put(self, partition: str) -> None:
        with self._lock:
            for counts in self._both(partition):
                counts.puts += 1

    def corrupt(self, partition: str | None = None) -> None:
        with self._lock:
            for counts in self._both(partition):
                counts.corrupt += 1

    def refused(self, partition: str, reason: str) -> None:
        with self._lock:
            for counts in self._both(partition):
                counts.refused[reason] += 1

    def evicted(self, partition: str, reason: str) -> None:
        with self._lock:
            for counts in self._both(partition):
                counts.evictions[reason] += 1

    def stats(self, partition: str | None, *, entries: int, bytes: int) -> StoreStats:
        """A copy of the counters with the store's present content."""
        with self._lock:
            counts = self._total if partition is None else self._by_partition.get(partition, _Counts())
            return StoreStats(
                entries=entries,
                bytes=bytes,
                hits=counts.hits,
                misses=counts.misses,
                puts=counts.puts,
                refused=dict(counts.refused),
                evictions=dict(counts.evictions),
                corrupt=counts.corrupt,
            )

    def _both(self, partition: str | None) -> list[_Counts]:
        if partition is None:
            return [self._total]
        return [self._total, self._by_partition.setdefault(partition, _Counts())]


class Listeners:
    """Functions called with the id of an entry that left. Call `tell` without holding a lock of the store."""

    def __init__(self) -> None:
        self._functions: list[Callable[[str], None]] = []

    def add(self, listener: Callable[[str], None]) -> None:
        self._functions.append(listener)

    def tell(self, ids: Iterable[str]) -> None:
        """A failing listener is logged; the others are still called."""
        for id in ids:
            for listener in list(self._functions):
                try:
                    listener(id)
                except Exception:
                    logger.exception("a listener failed for the evicted chunk %s", id)
