"""The seam to a queueing controller, which may forbid evictions that would leave too few entries."""

from typing import Protocol


class StableBlocks(Protocol):
    """Gives the number of entries that must stay."""

    def get_minimum_stable_blocks(self) -> int: ...


class QueueingController:
    """The default controller, which allows every eviction. Subclass it to keep a minimum."""

    def get_minimum_stable_blocks(self) -> int:
        """The fewest entries that evictions may leave. Called, under the cache's lock, before each eviction."""
        return 0
