"""A store around another: everything is the inner one's, but for what a subclass decides itself."""

from collections.abc import Callable, Iterator

from dejakv.store.base import Chunk, ChunkMeta, Store, StoreStats


class WrapperStore:
    """Hands every call to `inner`. Pins and uses reach it if it knows them."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def wants(self, id: str, tokens: int, partition: str) -> bool:
        """Whether it would pay to capture this prompt's state; True if the inner store does not say."""
        wants = getattr(self.inner, "wants", None)
        return wants is None or bool(wants(id, tokens, partition))

    def put(self, chunk: Chunk) -> bool:
        return self.inner.put(chunk)

    def get(self, id: str) -> Chunk | None:
        return self.inner.get(id)

    def meta(self, id: str) -> ChunkMeta | None:
        return self.inner.meta(id)

    def metas(self, partition: str | None = None, epoch: str | None = None) -> Iterator[ChunkMeta]:
        return self.inner.metas(partition, epoch)

    def delete(self, id: str) -> bool:
        return self.inner.delete(id)

    def clear(self, partition: str | None = None) -> int:
        return self.inner.clear(partition)

    def stats(self, partition: str | None = None) -> StoreStats:
        return self.inner.stats(partition)

    def touch(self, id: str) -> None:
        """Notes a use that a tier in front has served."""
        touch = getattr(self.inner, "touch", None)
        if touch is not None:
            touch(id)

    def pin(self, id: str) -> bool:
        """Keeps the entry until `unpin`; False if the inner store has no pins."""
        pin = getattr(self.inner, "pin", None)
        return bool(pin is not None and pin(id))

    def unpin(self, id: str) -> None:
        unpin = getattr(self.inner, "unpin", None)
        if unpin is not None:
            unpin(id)

    def on_evict(self, listener: Callable[[str], None]) -> None:
        self.inner.on_evict(listener)

    def flush(self) -> None:
        self.inner.flush()

    def close(self) -> None:
        self.inner.close()
