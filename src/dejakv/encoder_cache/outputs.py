"""Encoder outputs in memory: the block that is kept, and one budget with its order of eviction."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, Literal, get_args

from dejakv.encoder_cache.stats import EncoderCacheStats
from dejakv.errors import InputError
from dejakv.identity import digest_of
from dejakv.request import Modality
from dejakv.store.age import is_older, now
from dejakv.store.quotas import Part

Resolution = tuple[int, int]
PolicyName = Literal["lfu", "lru"]

Key = tuple[str, str, str, str]
"""Partition, encoder epoch, modality, content hash."""

KIND = "encoder"
MODALITIES: frozenset[str] = frozenset(get_args(Modality))


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


@dataclass(slots=True, eq=False)
class Entry:
    """A block with its place in the order: `(priority, tick)`. Ticks are unique."""

    key: Key
    block: VisualEmbeddingBlock
    uses: int = 1
    priority: float = 0.0
    tick: int = 0


class Outputs:
    """Blocks within a budget. Every change is all or nothing. Not thread-safe: the registry has the lock.

    The entry of the smallest priority leaves first, ties by recency: under "lru" all are equal, under "lfu" it is
    `age + uses`, where `age` is the priority of the last entry evicted (LFU with dynamic ageing; Arlitt et al.,
    "Evaluating content management techniques for Web proxy caches", 2000). A hit only raises a priority, so a heap keeps
    hits unsorted: an entry that reaches the top with an old one sinks to its new place, once for all its hits.

    minimum  called at each eviction: the fewest entries that evictions may leave
    figures  of each partition, where evictions and refusals are counted
    """

    def __init__(
        self, budget: Part, policy: PolicyName, minimum: Callable[[], int], figures: Mapping[str, EncoderCacheStats]
    ) -> None:
        self._budget = budget
        self._policy = policy
        self._minimum = minimum
        self._figures = figures
        self._bytes = 0
        self._age = 0.0
        self._tick = 0
        self._entries: dict[Key, Entry] = {}
        self._heap: list[tuple[float, int, Entry]] = []

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
        entry.uses += 1
        entry.block.access_count += 1
        self._rank(entry)

    def put(self, key: Key, block: VisualEmbeddingBlock) -> bool:
        """Stores the block, in place of one of the same key, whose uses it takes over; False if it was refused."""
        old = self.get(key)
        figures = self._figures[key[0]]
        refusal = self._make_room(block.estimated_vram_bytes, old)
        if refusal:
            figures.refusals[refusal] += 1
            return False
        entry = Entry(key, block)
        if old is not None:
            entry.uses = old.uses
            block.access_count = old.block.access_count
            self.drop(old)
            figures.evictions["replaced"] += 1
        self._rank(entry)
        self._entries[key] = entry
        self._bytes += block.estimated_vram_bytes
        self._push(entry)
        if len(self._heap) > 64 + 2 * len(self._entries):  # most places are of entries that left
            self._heap = [(entry.priority, entry.tick, entry) for entry in self]
            heapify(self._heap)
        return True

    def drop(self, entry: Entry) -> None:
        """Removes an entry; its place in the heap is dropped when it reaches the top."""
        del self._entries[entry.key]
        self._bytes -= entry.block.estimated_vram_bytes

    def _make_room(self, nbytes: int, old: Entry | None) -> str:
        """Evicts entries to make room for `nbytes`, with `old` replaced. Where that is not enough it evicts nothing and tells
        the reason."""
        if nbytes > self._budget.max_bytes:
            return "oversized"
        count = len(self._entries) + (old is None) - self._budget.max_entries
        excess = self._bytes - (old.block.estimated_vram_bytes if old else 0) + nbytes - self._budget.max_bytes
        if count <= 0 and excess <= 0:
            return ""
        reason = "entries" if count > 0 else "bytes"
        may_leave = len(self._entries) - self._minimum()
        popped: list[Entry] = []
        victims: list[Entry] = []
        while count > 0 or excess > 0:
            if len(victims) >= may_leave:
                for entry in popped:
                    self._push(entry)
                return "minimum"
            popped.append(victim := self._pop())
            if victim is not old:  # which leaves anyway
                victims.append(victim)
                count -= 1
                excess -= victim.block.estimated_vram_bytes
        for victim in victims:
            self._age = max(self._age, victim.priority)
            self.drop(victim)
            self._figures[victim.key[0]].evictions[reason] += 1
        return ""

    def _rank(self, entry: Entry) -> None:
        self._tick += 1
        entry.tick = self._tick
        entry.priority = self._age + entry.uses if self._policy == "lfu" else 0.0

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
