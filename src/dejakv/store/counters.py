"""Counters of a store, by partition, and listeners for entries that left."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable

from dejakv.store.base import StoreStats

logger = logging.getLogger("dejakv.store")

FAILED_WRITES = {
    "full": "the disk or bucket is full",
    "read_only": "the folder or bucket cannot be written",
    "error": "the disk or service reported an error",
}
"""Reasons of refusals that are failures of the place, in words."""


class StoreCounters:
    """Figures by partition and of all. Thread-safe.

    lock  the store's; not held by who counts
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._counts: Counter[tuple[str | None, str, str]] = Counter()

    def add(self, figure: str, partition: str | None = None, reason: str = "") -> None:
        """Count one more of a figure of `StoreStats`. Without a partition (of an unknown id) only the total counts it."""
        with self._lock:
            # A set: without a partition the total is counted once and not twice.
            for scope in {None, partition}:
                self._counts[scope, figure, reason] += 1

    def stats(self, partition: str | None, entries: int, nbytes: int) -> StoreStats:
        """A copy, with the store's present content."""
        with self._lock:
            partition_counts = {
                (figure, reason): n for (scope, figure, reason), n in self._counts.items() if scope == partition
            }
        figures = {
            figure: partition_counts.get((figure, ""), 0) for figure in ("hits", "misses", "puts", "corrupt", "late")
        }
        refused, evictions = (
            {reason: n for (counted_figure, reason), n in partition_counts.items() if counted_figure == each}
            for each in ("refused", "evictions")
        )
        return StoreStats(entries, nbytes, **figures, refused=refused, evictions=evictions)


class EntryListeners(list[Callable[[str], None]]):
    """Functions called with the id of an entry that left or came. Call `tell` without holding a lock of the store."""

    def tell(self, ids: Iterable[str]) -> None:
        """A failing listener is logged; the others are still called."""
        for id in ids:
            # A copy: a listener may add or remove others.
            for listener in list(self):
                try:
                    listener(id)
                except Exception:
                    logger.exception("a listener failed for the chunk %s", id)
