"""Settings of keeping: what a store takes and how much it holds."""

from dataclasses import dataclass
from typing import Literal

from dejakv.quotas import Parts, named_parts
from dejakv.settings import Count, Folder, Positive

EvictionPolicy = Literal["lru", "lfu"]


@dataclass(frozen=True)
class BudgetSettings:
    """What a store holds, of the cache and of vLLM's connector.

    max_bytes       budget in bytes
    memory_bytes    of a store on disk, what is also kept in memory
    policy          what is evicted first: `lru`, `lfu`
    min_tokens      shorter prompts are not stored
    second_sight    store a prompt only when it comes the second time
    max_write_rate  bytes a second the store may take, 0 for no limit
    """

    max_bytes: Count = 4 * 1024**3
    memory_bytes: Count = 512 * 1024**2
    policy: EvictionPolicy = "lru"
    min_tokens: Count = 0
    second_sight: bool = False
    max_write_rate: Count = 0


@dataclass(frozen=True)
class KeepSettings(BudgetSettings):
    """Where it is kept, and for how many.

    cache_dir          folder of the store; None: it is kept in memory
    max_cached_blocks  budget in entries; 0: no limit
    partitions         how many the budgets are divided among: each holds at most its equal part and evicts its own entries
                       alone, so that its figures tell nothing of the others; 1: one budget for all
    quotas             larger or smaller parts of named partitions, which `partitions` counts too: `NAME=BYTES` or
                       `NAME=BYTES:ENTRIES`. Of memory and encoder outputs they have the same share
    """

    cache_dir: Folder | None = None
    max_cached_blocks: Count = 0
    partitions: Positive = 1
    quotas: tuple[str, ...] = ()

    @property
    def parts(self) -> Parts:
        """What each partition has of the budgets. Raises: ConfigError where one has no part."""
        return Parts(self.partitions, self.max_bytes, self.max_cached_blocks, named_parts(self.quotas))
