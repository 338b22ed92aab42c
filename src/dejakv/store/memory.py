"""A store in the memory of this process."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import StoreError
from dejakv.store.age import now
from dejakv.store.base import NODE, Chunk, ChunkMeta, StoreStats, Tensor, as_node, may_split
from dejakv.store.codec import check
from dejakv.store.counters import Counters, Listeners, logger
from dejakv.store.eviction import Budget, PolicyName, policy_named
from dejakv.store.order import EvictionOrder, Leaving


def footprint(chunk: Chunk) -> int:
    """Size of a chunk in bytes: its tensor, vectors, token ids and texts."""
    return chunk.tensor.nbytes + description_bytes(chunk.meta)


def description_bytes(meta: ChunkMeta) -> int:
    vectors = sum(int(vector.nbytes) for vector in meta.vectors.values())
    return vectors + 4 * len(meta.token_ids) + len(meta.prompt) + len(meta.chunk)


def stamped(meta: ChunkMeta, tensor: Tensor) -> ChunkMeta:
    """The meta with `nbytes` of the tensor and, unless given, the present time as `created`."""
    return replace(meta, nbytes=tensor.nbytes, created=meta.created or now())


class MemoryStore:
    """Chunks in a dictionary. Thread-safe.

    max_bytes, max_entries  budgets, 0 for none; an entry larger than the budget is refused (`too_large`)
    policy                  `lru` or `lfu`
    in_front                for a tier in front of another store: a chunk is a copy, with or without its parent

    A writable array is copied on `put`; a read-only one is kept as it is. Arrays from `get` are read-only, because
    they are shared.
    """

    def __init__(
        self, max_bytes: int = 0, max_entries: int = 0, policy: PolicyName = "lru", *, in_front: bool = False
    ) -> None:
        self._budget = Budget(max_bytes, max_entries)
        self._order = EvictionOrder(policy_named(policy))
        self._in_front = in_front
        self._chunks: dict[str, Chunk] = {}
        self._bytes_of: Counter[str] = Counter()
        self._entries_of: Counter[str] = Counter()
        self._counters = Counters()
        self._listeners = Listeners()
        self._lock = threading.RLock()

    def put(self, chunk: Chunk) -> bool:
        try:
            chunk = _frozen(chunk)
        except StoreError as error:
            logger.warning("a chunk cannot be stored: %s", str(error))
            return self._refuse(chunk, "invalid")
        id, parent, size = chunk.meta.id, self._parent_of(chunk), footprint(chunk)
        if self._budget.excess_bytes(size):
            return self._refuse(chunk, "too_large")
        with self._lock:
            if parent and not self._can_follow(chunk.meta, parent):
                return self._refuse(chunk, "parent")
            more = chunk.meta.kind != NODE and not self._order.is_prompt(id)
            leaving = self._room(size - self._order.size(id), more, {id}, parent)
            if leaving is None:
                return self._refuse(chunk, "too_large")
            told = [*leaving, *self._apply(self._order.add(id, size, parent, node=chunk.meta.kind == NODE))]
            self._hold(chunk)
            self._counters.put(chunk.meta.partition)
        self._listeners.tell(told)
        return True

    def split(self, node: Chunk, rest: Chunk) -> bool:
        """See `Parents`."""
        node, rest = _frozen(node), _frozen(rest)
        size, left = footprint(node), footprint(rest)
        with self._lock:
            old = self._chunks.get(rest.meta.id)
            if old is None or node.meta.id in self._chunks or not may_split(old.meta, node.meta, rest.meta):
                return False
            more = node.meta.kind != NODE
            leaving = self._room(
                size + left - footprint(old), more, self._order.to_split(rest.meta.id), node.meta.parent
            )
            if leaving is None:
                return False
            self._order.split(node.meta.id, size, rest.meta.id, left, is_node=not more)
            self._hold(node)
            self._hold(rest)
        self._listeners.tell(leaving)
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
            known = self._order.is_prompt(id)
            gone = self._apply(self._order.discard(id) if self._in_front else self._order.remove(id))
        self._listeners.tell(gone)
        return known

    def discard(self, id: str) -> None:
        """See `Parents`."""
        with self._lock:
            gone = self._apply(self._order.discard(id))
        self._listeners.tell(gone)

    def clear(self, partition: str | None = None) -> int:
        with self._lock:
            metas = list(self.metas(partition))
            for meta in metas:
                self._apply(self._order.discard(meta.id))
        self._listeners.tell(meta.id for meta in metas)
        return sum(meta.kind != NODE for meta in metas)

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

    def on_evict(self, listener: Callable[[str], None]) -> None:
        self._listeners.add(listener)

    def flush(self) -> None:
        """Nothing is ever pending."""

    def close(self) -> None:
        """Forgets everything without telling the listeners."""
        with self._lock:
            for id in list(self._chunks):
                self._apply(self._order.discard(id))

    def _parent_of(self, chunk: Chunk) -> str:
        return "" if self._in_front else chunk.meta.parent

    def _can_follow(self, meta: ChunkMeta, parent: str) -> bool:
        held = self._chunks.get(parent)
        return held is not None and (held.meta.partition, held.meta.epoch) == (meta.partition, meta.epoch)

    def _room(self, nbytes: int, more: bool, protected: set[str], parent: str) -> list[str] | None:
        """Evicts what must leave for so many bytes, and for a prompt if there is one more; which they were, None if it is
        not possible."""
        bytes_over = self._budget.excess_bytes(self._order.bytes + nbytes)
        entries_over = self._budget.excess_entries(len(self._order) + more)
        leaving = self._order.evict(bytes_over, entries_over, protected, parent)
        if leaving is None:
            return None
        for id in (*leaving.gone, *leaving.nodes):
            if self._chunks[id].meta.kind != NODE:
                self._counters.evicted(self._chunks[id].meta.partition, "bytes" if bytes_over else "entries")
        return self._apply(leaving)

    def _apply(self, leaving: Leaving) -> list[str]:
        """Follows the order; returns whom to tell of."""
        for id in leaving.gone:
            self._let_go(id)
        for id in leaving.nodes:
            chunk = self._chunks[id]
            self._hold(Chunk(as_node(chunk.meta), chunk.tensor))
            self._order.resize(id, footprint(self._chunks[id]))
        return [*leaving.gone, *leaving.nodes]

    def _hold(self, chunk: Chunk) -> None:
        self._let_go(chunk.meta.id)
        self._chunks[chunk.meta.id] = chunk
        self._bytes_of[chunk.meta.partition] += footprint(chunk)
        self._entries_of[chunk.meta.partition] += chunk.meta.kind != NODE

    def _let_go(self, id: str) -> None:
        chunk = self._chunks.pop(id, None)
        if chunk is not None:
            self._bytes_of[chunk.meta.partition] -= footprint(chunk)
            self._entries_of[chunk.meta.partition] -= chunk.meta.kind != NODE

    def _refuse(self, chunk: Chunk, reason: str) -> bool:
        self._counters.refused(chunk.meta.partition, reason)
        return False


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
