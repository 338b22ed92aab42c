"""The interface to storage that outlives the process, such as `disk.DiskTier`; test other tiers with `dejakv.testing`."""

from dataclasses import dataclass
from typing import Protocol

from dejakv.encoder_cache.block import VisualEmbeddingBlock
from dejakv.encoder_cache.eviction import Key
from dejakv.identity import digest_of
from dejakv.store.selection import Purged, Selection

KIND = "encoder"


def chunk_id(key: Key) -> str:
    """The id of a key's chunk, 40 hexadecimal digits: another partition, epoch or modality is another chunk."""
    return digest_of(KIND, *key)[:40]


@dataclass(frozen=True)
class Recalled:
    """Result of a tier: a block or None, and whether it was damaged."""

    block: VisualEmbeddingBlock | None = None
    corrupt: bool = False


class Tier(Protocol):
    """Thread-safe. Data that is missing, damaged or cannot be written raises nothing: it costs a miss."""

    def load(self, key: Key) -> Recalled:
        """The block of exactly this key, its embedding on the CPU, in memory that belongs to the caller. May read a file."""
        ...

    def save(self, key: Key, block: VisualEmbeddingBlock) -> None:
        """Saves the block later: it is called under the cache's lock and must not wait for anything."""
        ...

    def clear(self, partition: str | None) -> None:
        """Drops a partition's blocks, or all, including those passed to `save` before."""
        ...

    def purge(self, selection: Selection, *, dry_run: bool = False) -> Purged:
        """Removes selected blocks, also those passed to `save` before; see `dejakv.store.purging`. Raises: StoreError."""
        ...

    def flush(self) -> None:
        """Returns when all blocks passed to `save` before can be loaded, also by other processes."""
        ...

    def close(self) -> None:
        """Flushes, then releases files and threads."""
        ...
