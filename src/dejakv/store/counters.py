"""Counters of a store by partition, and listeners for entries that left or came."""

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from dejakv.store.base import StoreStats, WriterStats

logger = logging.getLogger("dejakv.store")

EVICTION_REASONS = ("bytes", "entries", "quota", "snapshots")
"""By which limit an entry leaves: of the whole store, its partition's, or that of snapshots."""
FAILED_WRITES = {
    "full": "the disk or bucket is full",
    "read_only": "the folder or bucket cannot be written",
    "error": "the disk or service reported an error",
}
"""Text for each reason of a refusal that is a failure of the place."""


class StoreCounters:
    """Counters of each partition and of all together. Thread-safe.

    Parameters
    ----------
    lock : threading.Lock
        The store's lock. Callers must not hold it.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._counts: defaultdict[str | None, Counter[tuple[str, str]]] = defaultdict(Counter)

    def add(self, figure: str, partition: str | None = None, reason: str = "") -> None:
        """Count one more of a counter of `StoreStats`.

        Parameters
        ----------
        figure : str
            Name of the counter.
        partition : str | None
            None (of an unknown id): only the total counts it.
        reason : str
            Key of the counters `refused` and `evictions`.
        """
        with self._lock:
            # A set: without a partition the total is counted once and not twice.
            for scope in {None, partition}:
                self._counts[scope][figure, reason] += 1

    def stats(self, partition: str | None, entries: int, nbytes: int) -> StoreStats:
        """Return a copy of the counters, with the store's present content.

        Submissions and outages, which are counted elsewhere, are left at 0.

        Parameters
        ----------
        partition : str | None
            Whose counters; None: those of all together.
        entries, nbytes : int
            The present content.
        """
        with self._lock:
            partition_counts = dict(self._counts.get(partition, {}))

        # One pass over a copy: readers must not keep the lock from those who count.
        figures = {
            figure: partition_counts.get((figure, ""), 0)
            for figure in ("hits", "misses", "puts", "corrupt", "late")
        }
        refused, evictions = (
            {
                reason: n
                for (counted_figure, reason), n in partition_counts.items()
                if counted_figure == each
            }
            for each in ("refused", "evictions")
        )

        return StoreStats(
            entries,
            nbytes,
            **figures,
            refused=refused,
            evictions=evictions,
            submissions=WriterStats(),
        )


class EntryListeners(list[Callable[[str], None]]):
    """Functions called with the id of an entry that left or came."""

    def notify(self, ids: Iterable[str]) -> None:
        """Call every listener with every id. Call it without holding a lock of the store.

        A listener that raises is logged, and the others are still called.
        """
        for id in ids:
            # A copy: a listener may add or remove others.
            for listener in list(self):
                try:
                    listener(id)
                except Exception:
                    logger.exception("a listener failed for the entry %s", id)
