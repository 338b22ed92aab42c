"""A store around another: all behaviour is the inner store's, except for a subclass's own methods."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dejakv.store.base import (
    Admits,
    Chunk,
    ChunkMeta,
    Parents,
    Rows,
    Store,
    StoreStats,
    TakesParts,
    TellsNew,
    Touches,
)
from dejakv.store.donors import load_parts


class WrapperStore:
    """Passes every call to `inner`. Uses reach it if it supports them."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self._admits = inner if isinstance(inner, Admits) else None
        self._touches = inner if isinstance(inner, Touches) else None
        self._parents = inner if isinstance(inner, Parents) else None
        self._news = inner if isinstance(inner, TellsNew) else None
        self._parts = inner if isinstance(inner, TakesParts) else None

    def wants(self, id: str, tokens: int, partition: str) -> bool:
        """Whether this prompt's state should be captured; True if the inner store does not decide."""
        return self._admits is None or self._admits.wants(id, tokens, partition)

    def put(self, chunk: Chunk) -> bool:
        return self.inner.put(chunk)

    def get(self, id: str) -> Chunk | None:
        return self.inner.get(id)

    def get_parts(self, id: str, rows: Rows) -> Sequence[Chunk] | None:
        """See `LoadsParts`; the whole chunk if the inner store hands out no parts."""
        return load_parts(self.inner, id, rows)

    def split(self, node: Chunk, rest: Chunk) -> bool:
        """See `Parents`; False if the inner store knows no parents."""
        return self._parents is not None and self._parents.split(node, rest)

    def discard(self, id: str) -> None:
        """See `Parents`."""
        if self._parents is not None:
            self._parents.discard(id)

    def put_part(self, chunk: Chunk) -> bool:
        """See `TakesParts`; False if the inner store takes no parts."""
        return self._parts is not None and self._parts.put_part(chunk)

    def drop_parts(self, meta: ChunkMeta, ends: Sequence[int]) -> None:
        """See `TakesParts`."""
        if self._parts is not None:
            self._parts.drop_parts(meta, ends)

    def meta(self, id: str) -> ChunkMeta | None:
        return self.inner.meta(id)

    def metas(self, partition: str | None = None, epoch: str | None = None) -> Iterator[ChunkMeta]:
        return self.inner.metas(partition, epoch)

    def added(self, mark: Any = None) -> tuple[list[ChunkMeta], Any]:
        """See `TellsNew`; everything, if the inner store cannot tell."""
        return self._news.added(mark) if self._news is not None else (list(self.inner.metas()), None)

    def delete(self, id: str) -> bool:
        return self.inner.delete(id)

    def clear(self, partition: str | None = None) -> int:
        return self.inner.clear(partition)

    def stats(self, partition: str | None = None) -> StoreStats:
        return self.inner.stats(partition)

    def touch(self, id: str) -> None:
        """Notes a use served by a tier in front."""
        if self._touches is not None:
            self._touches.touch(id)

    def on_evict(self, listener: Callable[[str], None]) -> None:
        self.inner.on_evict(listener)

    def flush(self) -> None:
        self.inner.flush()

    def close(self) -> None:
        self.inner.close()
