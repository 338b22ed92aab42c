"""One budget in parts: a full partition evicts its own entries, never another's.

Under a shared budget, a partition could infer from its own remaining entries how much the others store. Here they depend
only on the partition's own requests. No part can be borrowed: taking it back would reveal the others too.
"""

import threading
from dataclasses import replace

from dejakv.errors import StoreError
from dejakv.quotas import Parts
from dejakv.store.base import NODE, Chunk, ChunkMeta, Store, StoreStats
from dejakv.store.counters import Counters, logger
from dejakv.store.eviction import Budget, PolicyName, policy_named
from dejakv.store.metacodec import encode_meta
from dejakv.store.order import EvictionOrder
from dejakv.store.wrapper import WrapperStore

_HEADER = 1024
"""More bytes than any store adds to a chunk's tensor and meta."""


class QuotaStore(WrapperStore):
    """A store in which each partition is limited to its part of the budgets. Thread-safe.

    parts     of the inner store's budgets; entries of more partitions than these are for are stored, but then the inner store
              may have to evict
    policy    eviction order within a partition
    in_front  as the inner store's

    The order of use is that of this process.
    """

    def __init__(
        self,
        inner: Store,
        parts: Parts,
        policy: PolicyName = "lru",
        *,
        in_front: bool = False,
    ) -> None:
        super().__init__(inner)
        self._parts = parts
        self._policy = policy_named(policy)
        self._in_front = in_front
        self._orders: dict[str, EvictionOrder] = {}
        self._owner: dict[str, str] = {}
        self._counters = Counters()
        self._lock = threading.Lock()
        inner.on_evict(self._left)
        for meta in inner.metas():
            self._learn(meta)

    def put(self, chunk: Chunk) -> bool:
        meta = chunk.meta
        size = self._size(chunk)
        if size is None:
            return False
        if self._quota(meta.partition).excess_bytes(size):
            self._counters.refused(meta.partition, "too_large")
            return False
        self._meet_others(meta.partition)
        with self._lock:
            order = self._order_of(meta.partition)
            more = meta.kind != NODE and not order.is_prompt(meta.id)
            quota = self._quota(meta.partition)
            room = self._room(quota, order, size - order.size(meta.id), more, {meta.id}, self._parent_of(chunk))
        if not self._leave(meta.partition, room) or not self.inner.put(chunk):
            return False
        with self._lock:
            order.add(meta.id, size, self._parent_of(chunk), node=meta.kind == NODE)
            self._owner[meta.id] = meta.partition
        return True

    def split(self, node: Chunk, rest: Chunk) -> bool:
        size, left = self._size(node), self._size(rest)
        id, partition = rest.meta.id, rest.meta.partition
        with self._lock:
            order = self._order_of(partition)
            if size is None or left is None or id not in order:
                return False
            more = node.meta.kind != NODE
            by = size + left - order.size(id)
            room = self._room(self._quota(partition), order, by, more, order.to_split(id), node.meta.parent)
        if not self._leave(partition, room) or not super().split(node, rest):
            return False
        with self._lock:
            if id in order:
                order.split(node.meta.id, size, id, left, is_node=not more)
                self._owner[node.meta.id] = partition
        return True

    def get(self, id: str) -> Chunk | None:
        chunk = super().get(id)
        if chunk is not None:
            self._used(id)
        return chunk

    def stats(self, partition: str | None = None) -> StoreStats:
        inner, own = self.inner.stats(partition), self._counters.stats(partition, entries=0, bytes=0)
        return replace(
            inner,
            refused={**inner.refused, **own.refused},
            evictions={**inner.evictions, **own.evictions},
        )

    def touch(self, id: str) -> None:
        super().touch(id)
        self._used(id)

    def _room(
        self, quota: Budget, order: EvictionOrder, nbytes: int, more: bool, protected: set[str], parent: str
    ) -> list[str] | None:
        """The prompts that must leave, in the order's own opinion already gone; None if that does not suffice."""
        leaving = order.evict(
            quota.excess_bytes(order.bytes + nbytes),
            quota.excess_entries(len(order) + more),
            protected,
            parent,
        )
        return None if leaving is None else [*leaving.gone, *leaving.nodes]

    def _leave(self, partition: str, victims: list[str] | None) -> bool:
        """Takes victims out of the inner store, where nodes go by themselves."""
        if victims is None:
            self._counters.refused(partition, "too_large")
            return False
        for id in victims:
            if self.inner.delete(id):
                self._counters.evicted(partition, "quota")
        return True

    def _quota(self, partition: str) -> Budget:
        part = self._parts.of(partition)
        return Budget(part.max_bytes, part.max_entries)

    def _parent_of(self, chunk: Chunk) -> str:
        return "" if self._in_front else chunk.meta.parent

    def _size(self, chunk: Chunk) -> int | None:
        try:
            return _size(chunk.meta, chunk.tensor.nbytes)
        except StoreError as error:
            logger.warning("a chunk cannot be stored: %s", str(error))
            self._counters.refused(chunk.meta.partition, "invalid")
            return None

    def _order_of(self, partition: str) -> EvictionOrder:
        return self._orders.setdefault(partition, EvictionOrder(self._policy))

    def _learn(self, meta: ChunkMeta) -> None:
        with self._lock:
            order = self._order_of(meta.partition)
            if meta.id not in order:
                parent = "" if self._in_front else meta.parent
                order.add(meta.id, _size(meta, meta.nbytes), parent, node=meta.kind == NODE)
                self._owner[meta.id] = meta.partition

    def _meet_others(self, partition: str) -> None:
        """Takes account of entries that other processes have stored for this partition."""
        with self._lock:
            known = len(self._order_of(partition))
        if self.inner.stats(partition).entries > known:
            for meta in self.inner.metas(partition):
                self._learn(meta)

    def _used(self, id: str) -> None:
        with self._lock:
            order = self._orders.get(self._owner.get(id, ""))
            if order is not None and id in order:
                order.touch(id)

    def _left(self, id: str) -> None:
        with self._lock:
            order = self._orders.get(self._owner.get(id, ""))
            if order is not None:
                for gone in order.remove(id).gone:
                    self._owner.pop(gone, None)
                if id not in order:  # it was chosen to leave here, so that the order let go of it before
                    self._owner.pop(id, None)


def shared_out(store: Store, parts: Parts, policy: PolicyName, *, in_front: bool = False) -> Store:
    """The store itself where nobody has a part, otherwise divided."""
    return QuotaStore(store, parts, policy, in_front=in_front) if parts.divided else store


def _size(meta: ChunkMeta, nbytes: int) -> int:
    """At least the size that a store counts for the chunk; otherwise the sum of the parts would exceed its budget."""
    return nbytes + len(encode_meta(meta)) + _HEADER
