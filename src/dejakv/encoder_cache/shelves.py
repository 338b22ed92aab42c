"""A shelf for each partition: one that is full evicts its own entries, never another's, and its figures tell nothing of others."""

from collections.abc import Callable, Iterator

from dejakv.encoder_cache.block import VisualEmbeddingBlock
from dejakv.encoder_cache.eviction import Entry, Key
from dejakv.encoder_cache.policy import Priority
from dejakv.encoder_cache.shelf import Placed, Shelf, Tally
from dejakv.quotas import Parts
from dejakv.store.selection import Selection


class Shelves:
    """As a `Shelf` to its caller. `minimum`: of all partitions together, of which each keeps an equal part."""

    def __init__(self, parts: Parts, priority: Priority, minimum: Callable[[], int]) -> None:
        self._parts = parts
        self._priority = priority
        self._minimum = minimum
        self._shelves: dict[str, Shelf] = {}
        self.max_entries = parts.max_entries
        self.max_bytes = parts.max_bytes

    def __iter__(self) -> Iterator[Entry]:
        return (entry for shelf in self._shelves.values() for entry in shelf)

    def get(self, key: Key) -> Entry | None:
        """See `Shelf`, as for all that follows."""
        return self._of(key[0]).get(key)

    def touch(self, entry: Entry) -> None:
        self._of(entry.key[0]).touch(entry)

    def put(self, key: Key, block: VisualEmbeddingBlock) -> Placed:
        return self._of(key[0]).put(key, block)

    def remove(self, key: Key) -> Entry | None:
        return self._of(key[0]).remove(key)

    def purge(self, selection: Selection, *, dry_run: bool) -> dict[str, int]:
        found: dict[str, int] = {}
        for shelf in self._shelves.values():
            found |= shelf.purge(selection, dry_run=dry_run)
        return found

    def tally(self, partition: str | None) -> Tally:
        if partition is not None:
            return self._of(partition).tally(None)
        total = Tally()
        for entry in self:
            total.count(entry, 1)
        return total

    def _of(self, partition: str) -> Shelf:
        if partition not in self._shelves:
            part = self._parts.of(partition)
            share = self._parts.partitions
            self._shelves[partition] = Shelf(
                part.max_entries, part.max_bytes, self._priority, lambda: self._minimum() // share
            )
        return self._shelves[partition]
