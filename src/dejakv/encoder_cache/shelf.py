"""The entries and their budget: present entries, the ones to evict for a new one, and the protected ones.

No locks and no counters here: the registry has those. Every change is all or nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dejakv.encoder_cache.block import VisualEmbeddingBlock
from dejakv.encoder_cache.eviction import Entry, EvictionQueue, Key
from dejakv.encoder_cache.policy import Priority
from dejakv.encoder_cache.tier import chunk_id
from dejakv.store.age import is_older, now
from dejakv.store.selection import Selection

_MIB = 1024 * 1024


@dataclass(frozen=True)
class Placed:
    """Result of storing a block. `refused` is empty if it was stored, otherwise the reason: `oversized` (larger than the whole
    budget), `minimum` (the controller forbids evicting)."""

    refused: str = ""
    victims: tuple[Entry, ...] = ()
    reason: str = ""


@dataclass(slots=True)
class Tally:
    """Entries and their bytes."""

    entries: int = 0
    bytes: int = 0

    def count(self, entry: Entry, sign: int) -> None:
        self.entries += sign
        self.bytes += sign * entry.block.estimated_vram_bytes


class Shelf:
    """Blocks within `max_entries` and `max_bytes`, evicted in the order of `priority`.

    minimum  called at each eviction: the fewest entries that evictions may leave
    """

    def __init__(self, max_entries: int, max_bytes: int, priority: Priority, minimum: Callable[[], int]) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self.total = Tally()
        self.age = 0.0
        self._priority = priority
        self._minimum = minimum
        self._entries: dict[Key, Entry] = {}
        self._queue = EvictionQueue()
        self._partitions: defaultdict[str, Tally] = defaultdict(Tally)
        self._tick = 0
        self._known_seconds = 0.0
        self._known_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: Key) -> Entry | None:
        """The entry, without counting a use; one that has expired leaves."""
        entry = self._entries.get(key)
        if entry is not None and entry.block.ttl and is_older(entry.block.born, entry.block.ttl, now()):
            self._drop(entry)
            return None
        return entry

    def touch(self, entry: Entry) -> None:
        """Counts a use. O(1)."""
        entry.uses = uses = entry.uses + 1
        entry.block.access_count += 1
        self._tick = tick = self._tick + 1
        entry.tick = tick
        entry.priority = self._priority(self.age, uses, entry.worth)

    def put(self, key: Key, block: VisualEmbeddingBlock) -> Placed:
        """Stores the block. It replaces one of the same key, and takes over its uses."""
        old = self._entries.get(key)
        placed = self._make_room(block.estimated_vram_bytes, old)
        if placed.refused:
            return placed
        entry = Entry(key, block, self._worth(block))
        if old is not None:
            entry.uses = old.uses
            block.access_count = old.block.access_count
            self._drop(old)
        self._tick += 1
        entry.tick = self._tick
        entry.priority = self._priority(self.age, entry.uses, entry.worth)
        self._entries[key] = entry
        self.total.count(entry, 1)
        self._partitions[key[0]].count(entry, 1)
        self._queue.push(entry)
        return placed

    def remove(self, key: Key) -> Entry | None:
        """Removes an entry."""
        entry = self._entries.get(key)
        if entry is not None:
            self._drop(entry)
        return entry

    def purge(self, selection: Selection, *, dry_run: bool) -> dict[str, int]:
        """Removes selected entries; their bytes by the ids that they have on disk."""
        at = now()
        found = [entry for entry in self if selection.takes_output(entry.key, entry.block.born, at)]
        for entry in found if not dry_run else ():
            self._drop(entry)
        return {chunk_id(entry.key): entry.block.estimated_vram_bytes for entry in found}

    def tally(self, partition: str | None) -> Tally:
        """Totals of one partition, or of all."""
        return self.total if partition is None else self._partitions.get(partition, Tally())

    def _make_room(self, nbytes: int, old: Entry | None) -> Placed:
        """Evicts entries to make room for `nbytes`, with `old` replaced; evicts nothing if that is not enough."""
        if nbytes > self.max_bytes:
            return Placed(refused="oversized")
        old_bytes = old.block.estimated_vram_bytes if old else 0
        count = len(self._entries) + (old is None)
        excess = self.total.bytes - old_bytes + nbytes - self.max_bytes
        if count <= self.max_entries and excess <= 0:
            return Placed()
        reason = "bytes" if count <= self.max_entries else "entries"
        may_leave = len(self._entries) - self._minimum()
        victims: list[Entry] = []
        skipped: Entry | None = None
        refused = False
        while count > self.max_entries or excess > 0:
            if len(victims) >= may_leave:
                refused = True
                break
            victim = self._queue.pop()
            if victim is old:
                skipped = victim
                continue
            victims.append(victim)
            count -= 1
            excess -= victim.block.estimated_vram_bytes
        if skipped is not None:
            self._queue.push(skipped)
        if refused:
            for victim in victims:
                self._queue.push(victim)
            return Placed(refused="minimum")
        for victim in victims:
            self.age = max(self.age, victim.priority)
            self._drop(victim)
        return Placed(victims=tuple(victims), reason=reason)

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self.total.count(entry, -1)
        tally = self._partitions[entry.key[0]]
        tally.count(entry, -1)
        if not tally.entries:
            del self._partitions[entry.key[0]]
        self._queue.forget(entry)

    def _worth(self, block: VisualEmbeddingBlock) -> float:
        """Encoder seconds a MiB; if not measured, the mean of the measured ones."""
        if block.encoder_seconds is not None:
            self._known_seconds += block.encoder_seconds
            self._known_bytes += block.estimated_vram_bytes
            return block.encoder_seconds * _MIB / block.estimated_vram_bytes
        return self._known_seconds * _MIB / self._known_bytes if self._known_bytes else 1.0
