"""Encoder outputs in memory: the block that is kept, and one budget with its order of eviction.

A policy is one number for each entry; the smallest leaves first, ties by recency. A hit only raises it, so a heap keeps hits unsorted: an
entry that reaches the top with an old number sinks to its new place, once for all its hits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, Literal, get_args

from dejakv.errors import ConfigError, InputError
from dejakv.identity import digest_of
from dejakv.request import Modality
from dejakv.store.age import is_older, now

Resolution = tuple[int, int]

Key = tuple[str, str, str, str]
"""Partition, encoder epoch, modality, content hash."""

KIND = "encoder"
MODALITIES: frozenset[str] = frozenset(get_args(Modality))
_MIB = 1024 * 1024


def chunk_id(key: Key) -> str:
    """The id of a key's output in a store, 40 hexadecimal digits: another partition, epoch or modality is another id."""
    return digest_of(KIND, *key)[:40]


@dataclass(slots=True, eq=False)
class VisualEmbeddingBlock:
    """The output of an encoder (tower and projector) for one picture, sound or clip.

    content_hash          SHA-256 of the raw bytes, 64 hexadecimal digits
    modality              "image", "audio" or "video"
    resolution            (width, height) in pixels, None for media without one
    embedding             `[tokens, hidden]`, or `[levels, tokens, hidden]`; numpy or torch, on any device; the stored
                          object, not a copy: do not write into it
    encoder_model         a label for people; the encoder epoch in the key keeps models apart
    created_at            `time.monotonic()` when it was stored
    access_count          how often it was served since then; updated by the cache while the block is in it
    estimated_vram_bytes  the bytes of the embedding's elements only: views are compacted when stored
    encoder_seconds       time of the computation, None if not measured
    born, ttl             seconds since 1970 when it was computed, and seconds for which it may be used from then on, 0 without
                          a limit; set by the cache, and kept on disk
    """

    content_hash: str
    modality: str
    resolution: Resolution | None
    embedding: Any = field(repr=False)
    encoder_model: str
    created_at: float
    access_count: int = 0
    estimated_vram_bytes: int = 0
    encoder_seconds: float | None = None
    born: float = 0.0
    ttl: float = 0.0


def check_key(modality: str, content_hash: str) -> None:
    """Raises: InputError for an unknown modality, and for an empty hash, which different pictures would share."""
    if modality not in MODALITIES:
        raise InputError(f"unknown modality {modality!r}: use one of {', '.join(sorted(MODALITIES))}")
    if not content_hash:
        raise InputError("the content hash is empty: pass compute_content_hash(raw_bytes) of the medium's bytes")


PolicyName = Literal["lfu", "lru", "cost"]
Priority = Callable[[float, int, float], float]
"""`priority(age, uses, worth)`: `age` is the number of the last entry evicted (0 at first), `uses` the requests for the entry (1 when
stored), `worth` the encoder seconds that a MiB of it saves each time."""


def lfu(age: float, uses: int, worth: float) -> float:
    """LFU with dynamic ageing: `age + uses` (Arlitt et al., "Evaluating content management techniques for Web proxy caches", 2000).

    A formerly popular entry outlives about `uses` full turns of the cache and no more.

    >>> lfu(age=5, uses=3, worth=0.1)
    8
    """
    return age + uses


def lru(age: float, uses: int, worth: float) -> float:
    """All equal: recency alone decides."""
    return 0.0


def cost(age: float, uses: int, worth: float) -> float:
    """Encoder seconds saved: `age + uses * encoder seconds / MiB` (GreedyDual-Size-Frequency, Cherkasova 1998)."""
    return age + uses * worth


POLICIES: dict[str, Priority] = {"lfu": lfu, "lru": lru, "cost": cost}


@dataclass(slots=True, eq=False)
class Entry:
    """A block with its place in the order: `(priority, tick)`. Ticks are unique."""

    key: Key
    block: VisualEmbeddingBlock
    worth: float
    uses: int = 1
    priority: float = 0.0
    tick: int = 0


@dataclass(frozen=True)
class Placed:
    """Result of storing a block. `refused` is empty if it was stored, else `oversized` (larger than the budget) or `minimum` (the
    controller forbids evicting). `reason`: the budget that evicted the victims, `entries` or `bytes`."""

    refused: str = ""
    victims: tuple[Entry, ...] = ()
    reason: str = ""


class Outputs:
    """Blocks within `max_entries` and `max_bytes`. Every change is all or nothing. Not thread-safe: the registry has the lock.

    minimum  called at each eviction: the fewest entries that evictions may leave

    Raises: ConfigError for an unknown policy.
    """

    def __init__(self, max_entries: int, max_bytes: int, policy: str, minimum: Callable[[], int]) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"unknown eviction policy {policy!r}: use one of {', '.join(POLICIES)}")
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self.bytes = 0
        self._age = 0.0
        self._priority = POLICIES[policy]
        self._minimum = minimum
        self._entries: dict[Key, Entry] = {}
        self._heap: list[tuple[float, int, Entry]] = []
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
            self.drop(entry)
            return None
        return entry

    def touch(self, entry: Entry) -> None:
        """Counts a use. O(1)."""
        entry.uses = uses = entry.uses + 1
        entry.block.access_count += 1
        self._tick = tick = self._tick + 1
        entry.tick = tick
        entry.priority = self._priority(self._age, uses, entry.worth)

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
            self.drop(old)
        self._tick += 1
        entry.tick = self._tick
        entry.priority = self._priority(self._age, entry.uses, entry.worth)
        self._entries[key] = entry
        self.bytes += block.estimated_vram_bytes
        self._push(entry)
        if len(self._heap) > 64 + 2 * len(self._entries):  # most places are of entries that left
            self._heap = [(entry.priority, entry.tick, entry) for entry in self]
            heapify(self._heap)
        return placed

    def drop(self, entry: Entry) -> None:
        """Removes an entry; its place in the heap is dropped when it reaches the top."""
        del self._entries[entry.key]
        self.bytes -= entry.block.estimated_vram_bytes

    def _make_room(self, nbytes: int, old: Entry | None) -> Placed:
        """Evicts entries to make room for `nbytes`, with `old` replaced; evicts nothing if that is not enough."""
        if nbytes > self.max_bytes:
            return Placed(refused="oversized")
        count = len(self._entries) + (old is None)
        excess = self.bytes - (old.block.estimated_vram_bytes if old else 0) + nbytes - self.max_bytes
        if count <= self.max_entries and excess <= 0:
            return Placed()
        reason = "bytes" if count <= self.max_entries else "entries"
        may_leave = len(self._entries) - self._minimum()
        victims: list[Entry] = []
        popped: list[Entry] = []
        while count > self.max_entries or excess > 0:
            if len(victims) >= may_leave:
                for entry in popped:
                    self._push(entry)
                return Placed(refused="minimum")
            popped.append(victim := self._pop())
            if victim is not old:  # which leaves anyway
                victims.append(victim)
                count -= 1
                excess -= victim.block.estimated_vram_bytes
        for victim in victims:
            self._age = max(self._age, victim.priority)
            self.drop(victim)
        return Placed(victims=tuple(victims), reason=reason)

    def _push(self, entry: Entry) -> None:
        heappush(self._heap, (entry.priority, entry.tick, entry))

    def _pop(self) -> Entry:
        """Takes the first entry to evict out of the heap."""
        while True:
            _, tick, entry = heappop(self._heap)
            if self._entries.get(entry.key) is not entry:
                continue
            if tick == entry.tick:
                return entry
            self._push(entry)

    def _worth(self, block: VisualEmbeddingBlock) -> float:
        """Encoder seconds a MiB; if not measured, the mean of the measured ones."""
        if block.encoder_seconds is not None:
            self._known_seconds += block.encoder_seconds
            self._known_bytes += block.estimated_vram_bytes
            return block.encoder_seconds * _MIB / block.estimated_vram_bytes
        return self._known_seconds * _MIB / self._known_bytes if self._known_bytes else 1.0
