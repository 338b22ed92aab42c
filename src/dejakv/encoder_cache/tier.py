"""The seam to where outputs outlive the process. `disk.DiskTier` is one; outsiders test theirs with `dejakv.testing`."""

from dataclasses import dataclass
from typing import Protocol

from dejakv.encoder_cache.block import VisualEmbeddingBlock
from dejakv.encoder_cache.eviction import Key


@dataclass(frozen=True)
class Recalled:
    """What a tier had: a block, or None, and whether that is because it was damaged."""

    block: VisualEmbeddingBlock | None = None
    corrupt: bool = False


class Tier(Protocol):
    """Thread-safe. Nothing raises for data that is missing, damaged or cannot be written: that costs a miss."""

    def load(self, key: Key) -> Recalled:
        """The block of exactly this key, its embedding on the CPU and the caller's own. May read a file."""
        ...

    def save(self, key: Key, block: VisualEmbeddingBlock) -> None:
        """Keeps the block, later: called under the cache's lock, it may not wait for anything."""
        ...

    def clear(self, partition: str | None) -> None:
        """Drops a partition's blocks, or all, and those that `save` was told of before."""
        ...

    def flush(self) -> None:
        """Returns when what `save` was told of before can be loaded, by other processes too."""
        ...

    def close(self) -> None:
        """Flushes and lets go of files and threads."""
        ...
