"""The eviction queue: a heap that sorts hits only when they matter.

A hit only raises an entry's rank, so the heap's copy of a rank is a lower bound: when an entry reaches the top with an
old rank it sinks to its new place, once for all its hits. A hit is O(1), an eviction O(log n) amortised.
"""

import heapq
from dataclasses import dataclass, field

from dejakv.encoder_cache.block import VisualEmbeddingBlock

Key = tuple[str, str, str, str]
"""Partition, encoder epoch, modality, content hash."""


@dataclass(slots=True, eq=False)
class Entry:
    """A block in the cache, with its place in the order. `(priority, tick)` is the rank; ticks are unique."""

    key: Key
    block: VisualEmbeddingBlock
    worth: float
    uses: int = 1
    priority: float = 0.0
    tick: int = 0
    held: bool = True
    queued: bool = field(default=False, repr=False)


class EvictionQueue:
    """Entries by rank, lowest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Entry]] = []
        self._gone = 0

    def push(self, entry: Entry) -> None:
        """Adds an entry with its present rank, unless it is in the queue."""
        if not entry.queued:
            entry.queued = True
            heapq.heappush(self._heap, (entry.priority, entry.tick, entry))

    def pop(self) -> Entry:
        """Removes and returns the first entry to evict; there must be one."""
        heap = self._heap
        while True:
            _, tick, entry = heap[0]
            if entry.held and tick != entry.tick:
                heapq.heapreplace(heap, (entry.priority, entry.tick, entry))
                continue
            heapq.heappop(heap)
            entry.queued = False
            if entry.held:
                return entry
            self._gone -= 1

    def forget(self, entry: Entry) -> None:
        """Notes that an entry has left. Its place is dropped when it reaches the top, or when most places are such."""
        entry.held = False
        if not entry.queued:
            return
        self._gone += 1
        if self._gone > 64 and self._gone * 2 > len(self._heap):
            self._heap = [item for item in self._heap if item[2].held]
            heapq.heapify(self._heap)
            self._gone = 0
