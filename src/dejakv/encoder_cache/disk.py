"""The disk tier: outputs as chunks of kind "encoder" in a store of their own, kept across restarts, shared by processes.

A folder on a memory file system (/dev/shm) makes it shared memory between an encoder process and its readers.
"""

import time
from pathlib import Path
from typing import Self, cast

from dejakv.encoder_cache.outputs import KIND, Key, Resolution, VisualEmbeddingBlock, chunk_id
from dejakv.encoder_cache.tensors import describe, from_raw, size_of, to_raw
from dejakv.errors import DejaKVError
from dejakv.store.base import Chunk, ChunkMeta
from dejakv.store.open import open_store
from dejakv.store.store import Store

_QUEUE = 256
"""Outputs that may wait to be written: a clip's frames come at once."""


class DiskTier:
    """Outputs in any `Store`, written by its background thread. What is missing, damaged or cannot be written costs a miss."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @classmethod
    def open(cls, folder: str | Path, max_bytes: int = 0, max_entries: int = 0) -> Self:
        """A tier in a folder for this user alone (0700). Budgets apply to all processes that use it; 0: none.

        Raises StoreError if the folder cannot be used.
        """
        return cls(open_store(folder, max_bytes=max_bytes, max_entries=max_entries, queue=_QUEUE))

    @property
    def dropped(self) -> int:
        """Outputs that were not written: the disk was full, or too slow and the queue was full, or they left before."""
        outcomes = self.store.outcomes
        return outcomes.dropped + outcomes.refused + outcomes.errors

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
        """Writes the block later; it can be loaded at once. Called under the cache's lock, so it waits for nothing."""
        self.store.submit(_meta_of(key, block), lambda: to_raw(block.embedding))

    def clear(self, partition: str | None) -> None:
        """Drops a partition's blocks, or all, those that wait to be written included."""
        self.store.flush()
        self.store.clear(partition)


def _meta_of(key: Key, block: VisualEmbeddingBlock) -> ChunkMeta:
    partition, epoch, modality, content_hash = key
    return ChunkMeta(
        id=chunk_id(key),
        partition=partition,
        epoch=epoch,
        token_ids=(),
        prompt="",
        chunk="",
        kind=KIND,
        created=block.born,
        ttl=block.ttl,
        metadata={
            **describe(block.embedding),
            "modality": modality,
            "content_hash": content_hash,
            "resolution": list(block.resolution) if block.resolution else None,
            "encoder_model": block.encoder_model,
            "encoder_seconds": block.encoder_seconds,
        },
    )


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
