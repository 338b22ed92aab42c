"""The order of eviction. A policy is an order of usage fields; a store evicts the first entry in that order.

lru  least recently used                  (last_used)
lfu  least often used, then least recently (hits, last_used)
"""

import heapq
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from dejakv.errors import ConfigError

PolicyName = Literal["lru", "lfu"]


@dataclass(frozen=True)
class Usage:
    """The use of an entry. `last_used` counts uses of the whole store, so it never repeats."""

    hits: int = 0
    last_used: int = 0


@dataclass(frozen=True)
class Policy:
    """`fields` of `Usage`, most significant first. The same names order the rows of a store on disk."""

    name: str
    fields: tuple[str, ...]

    def priority(self, usage: Usage) -> tuple[int, ...]:
        """The entry of the lowest priority is evicted first."""
        return tuple(getattr(usage, name) for name in self.fields)


POLICIES = {
    "lru": Policy("lru", ("last_used",)),
    "lfu": Policy("lfu", ("hits", "last_used")),
}


def policy_named(name: str) -> Policy:
    """Raises: ConfigError that lists the known policies."""
    if name not in POLICIES:
        raise ConfigError(f"eviction policy {name!r} is unknown: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]


@dataclass(frozen=True)
class Budget:
    """Limits of a store; 0: no limit."""

    max_bytes: int = 0
    max_entries: int = 0

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_entries"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative: give a limit, or 0 for none")

    def excess_bytes(self, total: int) -> int:
        return max(0, total - self.max_bytes) if self.max_bytes else 0

    def excess_entries(self, total: int) -> int:
        return max(0, total - self.max_entries) if self.max_entries else 0


class EvictionOrder:
    """Entries of a store in memory, in the order of eviction. `touch` costs O(log n), amortised.

    A heap: a use pushes a new item, and the old one is skipped later; it is rebuilt when more than half is old.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._clock = 0
        self._entries: dict[str, tuple[int, Usage]] = {}
        self._heap: list[tuple[tuple[int, ...], str]] = []
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def size(self, id: str) -> int:
        """Size of the entry in bytes; 0 if it is unknown."""
        return self._entries.get(id, (0, Usage()))[0]

    def add(self, id: str, nbytes: int) -> None:
        """A new entry, or a known one with new content: its past uses are forgotten."""
        self.remove(id)
        self.bytes += nbytes
        self._set(id, nbytes, hits=0)

    def touch(self, id: str) -> None:
        """Notes a use of a known entry."""
        nbytes, usage = self._entries[id]
        self._set(id, nbytes, hits=usage.hits + 1)

    def remove(self, id: str) -> None:
        self.bytes -= self._entries.pop(id, (0, Usage()))[0]

    def evict(self, nbytes: int, entries: int, protected: Collection[str] = ()) -> list[str] | None:
        """Removes entries until at least `nbytes` and `entries` are free.

        Returns their ids; or None, without any change, if the entries that are not `protected` do not suffice.
        """
        chosen: list[tuple[tuple[int, ...], str]] = []
        kept: list[tuple[tuple[int, ...], str]] = []
        freed = 0
        while (freed < nbytes or len(chosen) < entries) and self._heap:
            item = heapq.heappop(self._heap)
            if not self._current(item):
                continue
            if item[1] in protected:
                kept.append(item)
            else:
                chosen.append(item)
                freed += self._entries[item[1]][0]
        possible = freed >= nbytes and len(chosen) >= entries
        for item in kept if possible else kept + chosen:
            heapq.heappush(self._heap, item)
        if not possible:
            return None
        for _, id in chosen:
            self.remove(id)
        return [id for _, id in chosen]

    def _set(self, id: str, nbytes: int, *, hits: int) -> None:
        self._clock += 1
        usage = Usage(hits, self._clock)
        self._entries[id] = (nbytes, usage)
        heapq.heappush(self._heap, (self._policy.priority(usage), id))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [(self._policy.priority(used), key) for key, (_, used) in self._entries.items()]
            heapq.heapify(self._heap)

    def _current(self, item: tuple[tuple[int, ...], str]) -> bool:
        entry = self._entries.get(item[1])
        return entry is not None and self._policy.priority(entry[1]) == item[0]
