"""The seam to a queueing controller, which may forbid evictions that would leave too few entries."""

from typing import Protocol


class StableBlocks(Protocol):
    """Anything that knows how many entries must stay."""

    def get_minimum_stable_blocks(self) -> int: ...


class QueueingController:
    """The default controller, which lets every entry go. Subclass it to keep a minimum."""

    def get_minimum_stable_blocks(self) -> int:
        """The fewest entries that evictions may leave. Asked, under the cache's lock, whenever something must leave."""
        return 0
