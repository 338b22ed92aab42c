"""Two stores as one: a fast one in front of a larger one (memory over disk)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from dejakv.store.base import NODE, Chunk, ChunkMeta, Notices, Parents, Scrubs, Store, StoreStats, Touches
from dejakv.store.counters import Counters, Listeners

Fill = Literal["write", "read"]


class TieredStore:
    """Every chunk goes to both; one found only in the back is copied to the front. Thread-safe if the tiers are.

    fill  `read`: a new chunk goes only to the back, and to the front on its first read. Useful if the front costs a copy and
          most chunks are never read. A chunk refused by the back still goes to the front

    An entry is in the store while either tier has it; listeners are called once neither has. An entry removed from the
    back (also by another process) is removed from the front as well. Parents are the back's alone: the front has copies of
    chunks, with or without theirs, and a chunk that has a parent is refused with the back.
    """

    def __init__(self, front: Store, back: Store, fill: Fill = "write") -> None:
        self.front = front
        self.back = back
        self._fill = fill
        self._only_in_front: set[str] = set()
        self._counters = Counters()
        self._listeners = Listeners()
        tiers = (front, back)
        self._touching = [tier for tier in tiers if isinstance(tier, Touches)]
        self._shared = back if isinstance(back, Notices) else None
        front.on_evict(self._left_front)
        back.on_evict(self._left_back)

    def put(self, chunk: Chunk) -> bool:
        """True if at least one tier took it: with a full disk there is still the memory."""
        behind = self.back.put(chunk)
        if not behind and chunk.meta.parent:
            return False
        if behind and self._fill == "read":
            self.front.delete(chunk.meta.id)  # an older chunk with this id
            before = False
        else:
            before = self.front.put(chunk)
        if before and not behind:
            self._only_in_front.add(chunk.meta.id)
        elif behind:
            self._only_in_front.discard(chunk.meta.id)
            self._follow_back(chunk.meta.id)
        if before or behind:
            self._counters.put(chunk.meta.partition)
        return before or behind

    def get(self, id: str) -> Chunk | None:
        self._notice()
        chunk = self.front.get(id)
        if chunk is None:
            chunk = self.back.get(id)
            if chunk is not None:
                self.front.put(chunk)
                self._follow_back(id)
        else:
            # Otherwise the back would evict the most used entries, because it never sees their uses.
            for tier in self._touching:
                if tier is self.back:
                    tier.touch(id)
        if chunk is None:
            self._counters.miss()
        else:
            self._counters.hit(chunk.meta.partition)
        return chunk

    def meta(self, id: str) -> ChunkMeta | None:
        self._notice()
        return self.front.meta(id) or self.back.meta(id)

    def metas(self, partition: str | None = None, epoch: str | None = None) -> Iterator[ChunkMeta]:
        self._notice()
        seen: set[str] = set()
        for meta in self.front.metas(partition, epoch):
            seen.add(meta.id)
            yield meta
        for meta in self.back.metas(partition, epoch):
            if meta.id not in seen:
                yield meta

    def delete(self, id: str) -> bool:
        before, behind = self.front.delete(id), self.back.delete(id)
        return before or behind

    def split(self, node: Chunk, rest: Chunk) -> bool:
        """See `Parents`."""
        if not isinstance(self.back, Parents) or not self.back.split(node, rest):
            return False
        self.front.delete(rest.meta.id)  # the entry as it was
        return True

    def discard(self, id: str) -> None:
        """See `Parents`."""
        if isinstance(self.back, Parents):
            self.back.discard(id)
        self.front.delete(id)

    def clear(self, partition: str | None = None) -> int:
        # Clearing the back also removes its entries from the front: the rest was only in the front.
        removed = self.back.clear(partition)
        return removed + self.front.clear(partition)

    def stats(self, partition: str | None = None) -> StoreStats:
        """Counters of the whole; refusals, evictions and damage are those of the back. A chunk in both counts once."""
        back, front = self.back.stats(partition), self.front.stats(partition)
        alone = [meta for meta in self.front.metas(partition) if meta.id in self._only_in_front]
        held = self._counters.stats(
            partition,
            entries=max(front.entries, back.entries + len(alone)),
            bytes=max(front.bytes, back.bytes + sum(meta.nbytes for meta in alone)),
        )
        return replace(held, refused=back.refused, evictions=back.evictions, corrupt=back.corrupt + front.corrupt)

    def touch(self, id: str) -> None:
        """Notes a use in both tiers."""
        for tier in self._touching:
            tier.touch(id)

    def scrub(self, partition: str | None = None) -> None:
        """See `Scrubs`."""
        for tier in (self.front, self.back):
            if isinstance(tier, Scrubs):
                tier.scrub(partition)

    def on_evict(self, listener: Callable[[str], None]) -> None:
        self._listeners.add(listener)

    def flush(self) -> None:
        self.front.flush()
        self.back.flush()

    def close(self) -> None:
        self.front.close()
        self.back.close()

    def _notice(self) -> None:
        """Removes from the front the entries that other processes removed from the back."""
        if self._shared is not None and not self._shared.notice():
            for meta in list(self.front.metas()):
                if meta.id not in self._only_in_front and self.back.meta(meta.id) is None:
                    self._left_back(meta.id)

    def _follow_back(self, id: str) -> None:
        # Evicted, cleared or deleted from the back meanwhile: it must not stay in the front, which was notified too early.
        if self.back.meta(id) is None:
            self.front.delete(id)

    def _left_front(self, id: str) -> None:
        self._only_in_front.discard(id)
        behind = self.back.meta(id)
        if behind is None or behind.kind == NODE:
            self._listeners.tell([id])

    def _left_back(self, id: str) -> None:
        # If the front has it, its own removal tells the listeners.
        if not self.front.delete(id):
            self._listeners.tell([id])
