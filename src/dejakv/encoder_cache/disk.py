"""The disk tier: outputs as chunks of kind "encoder" in a store of their own, kept across restarts, shared by processes.

A folder on a memory file system (/dev/shm) makes it shared memory between an encoder process and its readers.
"""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, cast

from dejakv.encoder_cache.outputs import KIND, Key, Resolution, VisualEmbeddingBlock, chunk_id
from dejakv.encoder_cache.tensors import from_raw, size_of, to_raw
from dejakv.errors import DejaKVError
from dejakv.store.base import Chunk, ChunkMeta
from dejakv.store.open import open_store
from dejakv.store.selection import Purged, Selection
from dejakv.store.store import Store


class DiskTier:
    """Outputs in any `Store`, written on one background thread. What is missing, damaged or cannot be written costs a miss.

    max_pending_bytes  outputs waiting to be written stay in memory; beyond this many bytes new ones are not
                       written at all (`dropped` counts them): a slow disk costs later misses, never memory or time
    """

    def __init__(self, store: Store, max_pending_bytes: int = 256 * 1024**2) -> None:
        self.store = store
        self.dropped = 0
        self._max_pending = max_pending_bytes
        self._pending_bytes = 0
        self._pending: set[Future[None]] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="dejakv-encoder-disk")

    @classmethod
    def open(cls, folder: str | Path, max_bytes: int = 0, max_entries: int = 0) -> Self:
        """A tier in a folder for this user alone (0700). Budgets apply to all processes that use it; 0: none.

        Raises StoreError if the folder cannot be used.
        """
        return cls(open_store(folder, max_bytes=max_bytes, max_entries=max_entries))

    def load(self, key: Key) -> tuple[VisualEmbeddingBlock | None, bool]:
        """The block of exactly this key, its embedding on the CPU and the caller's own; and whether it was damaged, so that there is
        none."""
        id = chunk_id(key)
        if self.store.meta(id) is None:
            return None, False
        chunk = self.store.get(id)
        if chunk is None:
            return None, True
        try:
            return _block_of(key, chunk), False
        except (DejaKVError, KeyError, TypeError, ValueError):
            self.store.delete(id)
            return None, True

    def save(self, key: Key, block: VisualEmbeddingBlock) -> None:
        """Writes the block later. Called under the cache's lock, so it waits for nothing."""
        nbytes = block.estimated_vram_bytes
        with self._lock:
            if self._closed or self._pending_bytes + nbytes > self._max_pending:
                self.dropped += 1
                return
            self._pending_bytes += nbytes
            self._pending.add(future := self._writer.submit(self._write, key, block))
        future.add_done_callback(lambda done: self._written(done, nbytes))

    def clear(self, partition: str | None) -> None:
        """Drops a partition's blocks, or all, those that wait to be written included."""
        self.flush()
        self.store.clear(partition)

    def purge(self, selection: Selection, *, dry_run: bool = False) -> Purged:
        """Removes selected blocks, those that wait to be written included. Raises: StoreError."""
        self.flush()
        return self.store.purge(selection, dry_run=dry_run)

    def flush(self) -> None:
        """Returns when everything saved before can be loaded, also by other processes."""
        with self._lock:
            pending = list(self._pending)
        for future in pending:
            future.exception()
        self.store.flush()

    def close(self) -> None:
        """Flushes and closes the store; a closed tier drops new outputs."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._writer.shutdown(wait=True)
        self.store.close()

    def _write(self, key: Key, block: VisualEmbeddingBlock) -> None:
        if not self.store.put(_chunk_of(key, block)):
            with self._lock:
                self.dropped += 1

    def _written(self, future: Future[None], nbytes: int) -> None:
        with self._lock:
            self._pending.discard(future)
            self._pending_bytes -= nbytes
            self.dropped += future.exception() is not None


def _chunk_of(key: Key, block: VisualEmbeddingBlock) -> Chunk:
    partition, epoch, modality, content_hash = key
    tensor, described = to_raw(block.embedding)
    metadata: dict[str, Any] = {
        **described,
        "modality": modality,
        "content_hash": content_hash,
        "resolution": list(block.resolution) if block.resolution else None,
        "encoder_model": block.encoder_model,
        "encoder_seconds": block.encoder_seconds,
    }
    meta = ChunkMeta(
        id=chunk_id(key),
        partition=partition,
        epoch=epoch,
        token_ids=(),
        prompt="",
        chunk="",
        kind=KIND,
        created=block.born,
        ttl=block.ttl,
        metadata=metadata,
    )
    return Chunk(meta, tensor)


def _block_of(key: Key, chunk: Chunk) -> VisualEmbeddingBlock:
    _, _, modality, content_hash = key
    metadata = chunk.meta.metadata
    said = (chunk.meta.kind, chunk.meta.partition, chunk.meta.epoch, metadata["modality"], metadata["content_hash"])
    if said != (KIND, *key):
        raise ValueError("the chunk is of another key")
    embedding = from_raw(chunk.tensor, metadata)
    resolution = metadata["resolution"]
    return VisualEmbeddingBlock(
        content_hash=content_hash,
        modality=modality,
        resolution=cast(Resolution, tuple(resolution)) if resolution else None,
        embedding=embedding,
        encoder_model=str(metadata["encoder_model"]),
        created_at=time.monotonic(),
        estimated_vram_bytes=size_of(embedding),
        encoder_seconds=metadata["encoder_seconds"],
        born=chunk.meta.created,
        ttl=chunk.meta.ttl,
    )
