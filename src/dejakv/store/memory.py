"""A store in the memory of this process."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import StoreError
from dejakv.store.base import Chunk, ChunkMeta, StoreStats, Tensor
from dejakv.store.codec import check
from dejakv.store.counters import Counters, Listeners, logger
from dejakv.store.eviction import Budget, EvictionOrder, PolicyName, policy_named
from dejakv.store.usage import Pins


def footprint(chunk: Chunk) -> int:
    """Size of a chunk in bytes: its tensor, vectors, token ids and texts."""
    return chunk.tensor.nbytes + description_bytes(chunk.meta)


def description_bytes(meta: ChunkMeta) -> int:
    vectors = sum(int(vector.nbytes) for vector in meta.vectors.values())
    return vectors + 4 * len(meta.token_ids) + len(meta.prompt) + len(meta.chunk)


def stamped(meta: ChunkMeta, tensor: Tensor) -> ChunkMeta:
    """The meta with `nbytes` of the tensor and, unless given, the present time as `created`."""
    return replace(meta, nbytes=tensor.nbytes, created=meta.created or time.time())


class MemoryStore:
    """Chunks in a dictionary. Thread-safe.

    max_bytes, max_entries  budgets, 0 for none; an entry larger than the budget is refused (`too_large`)
    policy                  `lru` or `lfu`

    A writable array is copied on `put`; a read-only one is kept as it is. Arrays from `get` are read-only, because
    they are shared.
    """

    def __init__(self, max_bytes: int = 0, max_entries: int = 0, policy: PolicyName = "lru") -> None:
        self._budget = Budget(max_bytes, max_entries)
        self._order = EvictionOrder(policy_named(policy))
        self._chunks: dict[str, Chunk] = {}
        self._bytes_of: Counter[str] = Counter()
        self._entries_of: Counter[str] = Counter()
        self._pins = Pins()
        self._counters = Counters()
        self._listeners = Listeners()
        self._lock = threading.RLock()

    def put(self, chunk: Chunk) -> bool:
        try:
            chunk = _frozen(chunk)
        except StoreError as error:
            logger.warning("a chunk cannot be stored: %s", error)
            self._counters.refused(chunk.meta.partition, "invalid")
            return False
        id, partition, size = chunk.meta.id, chunk.meta.partition, footprint(chunk)
        with self._lock:
            if self._budget.excess_bytes(size):
                self._counters.refused(partition, "too_large")
                return False
            bytes_over = self._budget.excess_bytes(self._order.bytes - self._order.size(id) + size)
            entries_over = self._budget.excess_entries(len(self._order) + (id not in self._chunks))
            evicted = self._order.evict(bytes_over, entries_over, {id} | self._pins.held())
            if evicted is None:
                self._counters.refused(partition, "pinned")
                return False
            for other in evicted:
                self._counters.evicted(self._chunks[other].meta.partition, "bytes" if bytes_over else "entries")
                self._drop(other)
            self._drop(id)
            self._order.add(id, size)
            self._chunks[id] = chunk
            self._bytes_of[partition] += size
            self._entries_of[partition] += 1
            self._counters.put(partition)
        self._listeners.tell(evicted)
        return True

    def get(self, id: str) -> Chunk | None:
        with self._lock:
            chunk = self._chunks.get(id)
            if chunk is None:
                self._counters.miss()
                return None
            self._order.touch(id)
        self._counters.hit(chunk.meta.partition)
        return chunk

    def meta(self, id: str) -> ChunkMeta | None:
        chunk = self._chunks.get(id)
        return chunk.meta if chunk else None

    def metas(self, partition: str | None = None, epoch: str | None = None) -> Iterator[ChunkMeta]:
        with self._lock:
            chunks = list(self._chunks.values())
        for chunk in chunks:
            if partition in (None, chunk.meta.partition) and epoch in (None, chunk.meta.epoch):
                yield chunk.meta

    def delete(self, id: str) -> bool:
        with self._lock:
            known = self._drop(id)
        if known:
            self._listeners.tell([id])
        return known

    def clear(self, partition: str | None = None) -> int:
        with self._lock:
            ids = [meta.id for meta in self.metas(partition)]
            for id in ids:
                self._drop(id)
        self._listeners.tell(ids)
        return len(ids)

    def stats(self, partition: str | None = None) -> StoreStats:
        with self._lock:
            if partition is None:
                return self._counters.stats(None, entries=len(self._order), bytes=self._order.bytes)
            entries, held = self._entries_of[partition], self._bytes_of[partition]
            return self._counters.stats(partition, entries=entries, bytes=held)

    def touch(self, id: str) -> None:
        """Notes a use served by a tier in front."""
        with self._lock:
            if id in self._chunks:
                self._order.touch(id)

    def pin(self, id: str) -> bool:
        """Keeps an entry from being evicted until `unpin`; pins count. False if the entry is unknown."""
        with self._lock:
            if id not in self._chunks:
                return False
            self._pins.add(id)
            return True

    def unpin(self, id: str) -> None:
        self._pins.remove(id)

    def on_evict(self, listener: Callable[[str], None]) -> None:
        self._listeners.add(listener)

    def flush(self) -> None:
        """Nothing is ever pending."""

    def close(self) -> None:
        """Forgets everything without telling the listeners."""
        with self._lock:
            for id in list(self._chunks):
                self._drop(id)

    def _drop(self, id: str) -> bool:
        chunk = self._chunks.pop(id, None)
        if chunk is None:
            return False
        self._bytes_of[chunk.meta.partition] -= footprint(chunk)
        self._entries_of[chunk.meta.partition] -= 1
        self._order.remove(id)
        return True


def _frozen(chunk: Chunk) -> Chunk:
    check(chunk.tensor)
    tensor = Tensor(_read_only(chunk.tensor.data), chunk.tensor.dtype)
    vectors = {name: _read_only(vector) for name, vector in chunk.meta.vectors.items()}
    return Chunk(replace(stamped(chunk.meta, tensor), vectors=vectors), tensor)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    if array.flags.writeable or not array.flags.c_contiguous:
        array = np.array(array, order="C")
        array.flags.writeable = False
    return array
