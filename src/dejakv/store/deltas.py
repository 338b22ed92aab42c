"""A store without duplicates: of a prompt it keeps the rows that no stored prefix has, and puts the whole together on loading.

    put    the longest stored exact prefix becomes the chunk's parent. Where it ends inside a chunk, that chunk is split there:
           the rows before become a node of their own, the parent of both (a radix tree)
    get    the rows of the chunk and of those above it, in one array

Only exact state of one partition and epoch is shared, media included. Which parents there are is for the store below to say: it
refuses a chunk whose parent has left meanwhile, and the chunk is then stored whole.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from dejakv.store.base import KV, NODE, Chunk, ChunkMeta, Rows, Store, StoreStats, as_node
from dejakv.store.codec import CorruptChunk
from dejakv.store.counters import Counters, Listeners, logger
from dejakv.store.parts import (
    Assembly,
    beginning_of,
    check_alike,
    cut,
    delivered,
    follows,
    has_its_rows,
    is_exact,
    needed,
    outside_media,
    row_bytes,
)
from dejakv.store.prefix import PrefixIndex
from dejakv.store.wrapper import WrapperStore

LEAST_SHARED = 16
"""Rows that a parent or a split must save: the block of the prefix index, which finds nothing shorter. A node costs a file, a
description, and a part to read in each load."""

_T = TypeVar("_T")

_TRIES = 3
"""Readings of a chunk that others change meanwhile."""


class DeltaStore(WrapperStore):
    """A store around one that knows parents (`Parents`); around any other, every chunk is stored whole. Thread-safe.

    Nodes are not shown: a prompt of which only others hold the rows is not stored. Descriptions (`meta`, `metas`) tell the
    parent, and the bytes that a prompt takes by itself; a chunk from `get` stands alone.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._index: PrefixIndex | None = None
        self._beginning = threading.Lock()
        self._counters = Counters()
        self._listeners = Listeners()
        inner.on_evict(self._left)

    def put(self, chunk: Chunk) -> bool:
        """Refused (`invalid`): a part of a prompt, or a prompt with undefined rows."""
        meta = chunk.meta
        if meta.kind == NODE or meta.parent or chunk.rows is not None:
            logger.warning("chunk %s is only a part of a prompt: give whole prompts", meta.id)
            self._counters.refused(meta.partition, "invalid")
            return False
        shared = self._parents is not None and is_exact(chunk)
        stored = self._put_shared(chunk) if shared else self.inner.put(chunk)
        if stored:
            self._counters.put(meta.partition)
        return stored

    def put_part(self, chunk: Chunk) -> bool:
        """See `TakesParts`: each part is a node below the one before it, and the last is the prompt. Refused: `invalid`, or `parent`
        where the rows before it have left."""
        part = delivered(chunk)
        if part is None or self._parents is None:
            logger.warning("chunk %s is no part of a prompt's exact state, or this store takes none", chunk.meta.id)
            self._counters.refused(chunk.meta.partition, "invalid")
            return False
        stored = self._put_delivered(part)
        if stored and part.meta.kind != NODE:
            self._counters.put(part.meta.partition)
        return stored

    def drop_parts(self, meta: ChunkMeta, ends: Sequence[int]) -> None:
        """See `TakesParts`."""
        for end in reversed(ends):
            held = self.inner.meta(beginning_of(meta, end).id)
            if held is not None and held.kind == NODE:
                self.inner.delete(held.id)  # nothing happens while others need its rows

    def get(self, id: str) -> Chunk | None:
        return self._load(id, self._whole)

    def get_parts(self, id: str, rows: Rows) -> Sequence[Chunk] | None:
        """See `LoadsParts`."""
        return self._load(id, lambda meta, last: self._parts_of(meta, rows, last))

    def meta(self, id: str) -> ChunkMeta | None:
        meta = self.inner.meta(id)
        return meta if meta is not None and meta.kind != NODE else None

    def metas(self, partition: str | None = None, epoch: str | None = None) -> Iterator[ChunkMeta]:
        return (meta for meta in self.inner.metas(partition, epoch) if meta.kind != NODE)

    def added(self, mark: Any = None) -> tuple[list[ChunkMeta], Any]:
        metas, mark = super().added(mark)
        return [meta for meta in metas if meta.kind != NODE], mark

    def delete(self, id: str) -> bool:
        return self.meta(id) is not None and self.inner.delete(id)

    def stats(self, partition: str | None = None) -> StoreStats:
        """Hits, misses and puts are of whole prompts."""
        inner, own = self.inner.stats(partition), self._counters.stats(partition, entries=0, bytes=0)
        refused = {why: inner.refused.get(why, 0) + own.refused.get(why, 0) for why in {**inner.refused, **own.refused}}
        counts = {"hits": own.hits, "misses": own.misses, "puts": own.puts, "corrupt": inner.corrupt + own.corrupt}
        return replace(inner, refused=refused, **counts)

    def on_evict(self, listener: Callable[[str], None]) -> None:
        self._listeners.add(listener)

    def _put_shared(self, chunk: Chunk) -> bool:
        index = self._begin()
        parent = self._parent_for(index, chunk)
        if parent is None:
            stored = self.inner.put(chunk)
        elif parent.id == chunk.meta.id:
            stored = True  # it is what was split off a longer prompt
        else:
            delta = cut(chunk, chunk.meta, parent, chunk.meta.num_tokens)
            stored = self.inner.put(delta) or self.inner.put(chunk)
        if stored:
            index.add(chunk.meta)
        return stored

    def _put_delivered(self, part: Chunk) -> bool:
        meta = part.meta
        known = self.inner.meta(meta.id)
        if known is not None:
            return meta.kind == NODE or known.kind == meta.kind or self._show(known, meta)
        index = self._begin()
        parent = self._parent_for(index, part)
        if parent is None or parent.num_tokens < meta.rows_from:
            if meta.rows_from:
                self._counters.refused(meta.partition, "parent")
                return False
            stored = self.inner.put(part)
        elif parent.id == meta.id:
            stored = True
        else:
            stored = self.inner.put(cut(part, meta, parent, meta.num_tokens))
        if stored:
            index.add(meta)
        return stored

    def _show(self, node: ChunkMeta, prompt: ChunkMeta) -> bool:
        """Makes a node the prompt whose rows it ends."""
        held = self.inner.get(node.id)
        described = replace(prompt, parent=node.parent, rows_from=node.rows_from)
        return held is not None and self.inner.put(replace(held, meta=described))

    def _begin(self) -> PrefixIndex:
        """The index of stored prefixes, made when the first chunk is stored: who only reads needs none."""
        with self._beginning:
            if self._index is None:
                index = PrefixIndex(self.inner)
                for meta in sorted(self.inner.metas(), key=lambda meta: meta.created):
                    _learn(index, meta)
                self._index = index
            return self._index

    def _parent_for(self, index: PrefixIndex, chunk: Chunk) -> ChunkMeta | None:
        """The entry that has a chunk's first rows, after a split if need be; None if the chunk is to be stored whole."""
        meta = chunk.meta
        known = self.inner.meta(meta.id)
        if known is not None:  # replaced, or a node that becomes a prompt: it keeps its place
            return self._above(known)
        hit = index.longest(meta.partition, meta.epoch, meta.token_ids, meta.spans, whole=True)
        if hit is None:
            return None
        shared = outside_media(hit.tokens, meta.spans)
        held = self.inner.meta(hit.donor)
        while held is not None and shared <= held.rows_from:
            held = self._above(held)
        if (
            held is None
            or shared < LEAST_SHARED
            or row_bytes(held) != row_bytes(replace(meta, nbytes=chunk.tensor.nbytes))
        ):
            return None
        if shared == held.num_tokens:
            return held
        above = self._above(held)
        if shared - held.rows_from < LEAST_SHARED:
            return above
        return self._split(index, held, above, shared, chunk.meta) or above

    def _above(self, meta: ChunkMeta) -> ChunkMeta | None:
        return self.inner.meta(meta.parent) if meta.parent else None

    def _split(
        self, index: PrefixIndex, held: ChunkMeta, above: ChunkMeta | None, at: int, new: ChunkMeta
    ) -> ChunkMeta | None:
        """Splits a held entry where a new prompt leaves it, or ends: then the part before, which is handed back, is that prompt."""
        own = at == new.num_tokens
        upper = new if own else as_node(beginning_of(held, at))
        there = self.inner.meta(upper.id)
        if there is not None:  # made by another process since
            return self._above(there) if own else there
        part = self.inner.get(held.id)
        if part is None or part.meta.rows_from != held.rows_from or not has_its_rows(part):
            return None
        if not self.split(cut(part, upper, above, at), cut(part, held, upper, held.num_tokens)):
            return None
        index.add(upper)
        return upper

    def _load(self, id: str, read: Callable[[ChunkMeta, bool], _T | None]) -> _T | None:
        partition = None
        for left in reversed(range(_TRIES)):
            meta = self.meta(id)
            if meta is None:
                break
            partition = meta.partition
            loaded = read(meta, not left)
            if loaded is not None:
                self._counters.hit(partition)
                if self._index is not None:
                    _learn(self._index, meta)  # another process may have stored it
                return loaded
        self._counters.miss(partition)
        return None

    def _whole(self, meta: ChunkMeta, last: bool) -> Chunk | None:
        """A prompt's state, None if something of it has changed or left. On the `last` try an entry without its parent goes."""
        if not meta.parent:
            alone = self._parts_of(meta, None, last)
            return alone[0] if alone else None
        whole = Assembly(0, meta.num_tokens)
        tensor = whole.tensor() if self._gather(meta, None, whole.add, last) else None
        return None if tensor is None else Chunk(replace(meta, parent="", rows_from=0, nbytes=tensor.nbytes), tensor)

    def _parts_of(self, meta: ChunkMeta, rows: Rows | None, last: bool) -> Sequence[Chunk] | None:
        """The same in parts, as they are held."""
        parts: list[Chunk] = []

        def add(part: Chunk) -> None:
            if meta.parent:  # what stands alone may be anything
                check_alike(part, (parts or [part])[0].tensor)
            parts.append(part)

        return parts if self._gather(meta, rows, add, last) else None

    def _gather(self, meta: ChunkMeta, rows: Rows | None, add: Callable[[Chunk], None], last: bool) -> bool:
        """Adds what holds some of the rows, first rows first; `add` raises CorruptChunk for what does not fit."""
        chain = [meta]
        while chain[-1].parent:
            parent = self._above(chain[-1])
            if parent is None or not follows(chain[-1], parent):
                if last:
                    self._lost(chain[-1], "its parent is gone")
                return False
            chain.append(parent)
        wanted = needed(reversed(chain), rows) or [meta]
        if wanted[-1] is not meta:
            self.touch(meta.id)  # a use, although nothing of its own is read
        try:
            for of in wanted:
                part = self.inner.get(of.id)
                if part is None or part.meta.rows_from != of.rows_from or (of is meta and part.meta.kind == NODE):
                    return False
                add(part)
        except CorruptChunk as error:
            self._counters.corrupt(meta.partition)
            self._lost(meta, str(error))
            return False
        return True

    def _lost(self, meta: ChunkMeta, why: str) -> None:
        logger.warning("chunk %s and all that need its rows are removed: %s", meta.id, why)
        self.discard(meta.id)

    def _left(self, id: str) -> None:
        meta = self.inner.meta(id)
        if meta is None and self._index is not None:
            self._index.remove(id)
        if meta is None or meta.kind == NODE:
            self._listeners.tell([id])


def _learn(index: PrefixIndex, meta: ChunkMeta) -> None:
    if meta.kind in (KV, NODE) and not meta.position and not meta.generation:
        index.add(meta)
