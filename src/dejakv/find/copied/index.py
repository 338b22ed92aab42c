"""Where fingerprints stand in the segments of one space. Packed arrays in sorted tiers, merged as they grow (an LSM tree)."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dejakv.find.copied.fingerprints import Fingerprints
from dejakv.find.copied.tier import ENTRY_BYTES, Tier, merged, numbers_of, within_cap

SEGMENT_BYTES = 256
"""What the name of a segment and its place in two tables take, about."""

GROWTH = 8
"""How many times as large as the next a tier is at least. More: fewer tiers to search, more merging."""

DEAD_SHARE = 0.25
"""Share of entries of removed segments above which the index is compacted."""


def bytes_of(places: int) -> int:
    """Memory of a segment of so many places."""
    return ENTRY_BYTES * places + SEGMENT_BYTES


@dataclass(frozen=True)
class Holders:
    """Places where fingerprints stand: `[c]` each, sorted by key, then number.

    keys       which of the keys that were asked for
    numbers    segment, as `names` knows it; higher is newer
    positions  where in the segment
    """

    keys: NDArray[np.int64]
    numbers: NDArray[np.int64]
    positions: NDArray[np.int64]
    names: Sequence[str]


@dataclass(frozen=True)
class _Held:
    """What a search sees. Tiers never change; of the rest, what concerns new and removed segments changes in place.

    names       `[s]` by number, `number_of` the living ones' numbers
    sizes, alive, uses  `[s or more]`: places added, whether it is still held, how often it was used
    """

    tiers: tuple[Tier, ...]
    names: list[str]
    number_of: dict[str, int]
    sizes: NDArray[np.int32]
    alive: NDArray[np.bool_]
    uses: NDArray[np.uint32]

    @classmethod
    def empty(cls) -> "_Held":
        return cls((), [], {}, np.zeros(16, np.int32), np.zeros(16, np.bool_), np.zeros(16, np.uint32))

    def grown(self) -> "_Held":
        """With room for twice as many segments."""
        room = np.zeros(len(self.alive), np.bool_)
        return replace(
            self,
            sizes=np.concatenate([self.sizes, room.astype(np.int32)]),
            alive=np.concatenate([self.alive, room]),
            uses=np.concatenate([self.uses, room.astype(np.uint32)]),
        )

    def compacted(self) -> "_Held":
        """Without removed segments and their places, the others numbered anew in their order."""
        alive = np.flatnonzero(self.alive[: len(self.names)])
        new = np.full(len(self.names), -1, np.int64)
        new[alive] = np.arange(len(alive))
        names = [self.names[number] for number in alive.tolist()]
        tiers = tuple(tier for tier in (tier.renumbered(new) for tier in self.tiers) if len(tier))
        room = (0, max(16, len(alive) + len(alive) // 4) - len(alive))
        return _Held(
            tiers,
            names,
            {name: number for number, name in enumerate(names)},
            sizes=np.pad(self.sizes[alive], room),
            alive=np.pad(self.alive[alive], room),
            uses=np.pad(self.uses[alive], room),
        )


class CopiedIndex:
    """Segments by their fingerprints. Thread-safe: a search locks nothing, changes wait for one another.

    1.5 bytes an indexed token, up to a third more until removed segments are compacted away, and at most twice as much while
    tiers are merged.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dead = 0
        self._held = _Held.empty()

    def __len__(self) -> int:
        return len(self._held.number_of)

    def __contains__(self, name: object) -> bool:
        return name in self._held.number_of

    @property
    def entries(self) -> int:
        """Places held, those of removed segments included until they are compacted away."""
        return sum(len(tier) for tier in self._held.tiers)

    @property
    def nbytes(self) -> int:
        held = self._held
        arrays = held.sizes.nbytes + held.alive.nbytes + held.uses.nbytes
        return sum(tier.nbytes for tier in held.tiers) + arrays + SEGMENT_BYTES * len(held.names)

    def add(self, name: str, found: Fingerprints) -> bool:
        """Indexes a segment; False for one that is known, or has no fingerprints."""
        if not len(found):
            return False
        with self._lock:
            held = self._held
            if name in held.number_of:
                return False
            number = len(held.names)
            if number == len(held.alive):
                held = held.grown()
            held.sizes[number] = len(found)
            held.alive[number] = True
            held.uses[number] = 0
            tiers = [*held.tiers, Tier.of(number, found).capped(held.uses)]
            while len(tiers) > 1 and len(tiers[-2]) < GROWTH * len(tiers[-1]):
                newer, older = (self._living(tier, held) for tier in (tiers.pop(), tiers.pop()))
                tiers.append(merged(older, newer).capped(held.uses))
            held.names.append(name)
            held.number_of[name] = number
            self._held = replace(held, tiers=tuple(tiers))
        return True

    def remove(self, name: str) -> bool:
        """Takes a segment out: it is not found from now on, and its memory is given back with the next compaction."""
        with self._lock:
            if not self._drop(name):
                return False
            if self._dead > DEAD_SHARE * self.entries:
                self._compact()
            return True

    def shrink(self, nbytes: int) -> list[str]:
        """Takes out the oldest segments until at most `nbytes` are held; which they were."""
        gone: list[str] = []
        with self._lock:
            if self._dead and self.nbytes > nbytes:
                self._compact()
            while len(self) and (excess := self.nbytes - nbytes) > 0:
                held = self._held
                for number, name in enumerate(list(held.names)):
                    excess -= bytes_of(int(held.sizes[number]))  # at most: some are beyond the cap
                    self._drop(name)
                    gone.append(name)
                    if excess <= 0:
                        break
                self._compact()
        return gone

    def used(self, names: Sequence[str]) -> None:
        """Notes that segments were of use: where a fingerprint has too many holders, those used most stay. It locks nothing either:
        a use noted during a change may be lost."""
        held = self._held
        for name in names:
            number = held.number_of.get(name)
            if number is not None:
                held.uses[number] += 1

    def holders(self, keys: NDArray[np.uint32]) -> Holders:
        """Where these fingerprints stand (sorted, each once): at most 16 places each."""
        held = self._held
        which: list[NDArray[np.int64]] = []
        numbers: list[NDArray[np.int64]] = []
        positions: list[NDArray[np.int64]] = []
        for tier in held.tiers:
            first, count = tier.ranges(keys)
            present = np.flatnonzero(count)
            if not present.size:
                continue
            first, count = first[present], count[present]
            skip = np.cumsum(count) - count
            places = np.arange(int(count.sum())) + np.repeat(first - skip, count)
            which.append(np.repeat(present, count))
            numbers.append(numbers_of(tier.entries[places]))
            positions.append(tier.positions[places].astype(np.int64))
        if not which:
            nothing = np.empty(0, np.int64)
            return Holders(nothing, nothing, nothing, held.names)
        key, number, position = np.concatenate(which), np.concatenate(numbers), np.concatenate(positions)
        there = held.alive[number]
        key, number, position = key[there], number[there], position[there]
        # Tiers follow each other in age, so sorting by key alone leaves numbers in order; numpy sorts 16 bits in linear time.
        order = np.argsort(key.astype(np.uint16) if len(keys) <= 1 << 16 else key, kind="stable")
        order = order[within_cap(key[order], number[order], held.uses)]
        return Holders(key[order], number[order], position[order], held.names)

    def _living(self, tier: Tier, held: _Held) -> Tier:
        """Without places of removed segments, which must not count as holders."""
        return tier.only(held.alive[numbers_of(tier.entries)]) if self._dead else tier

    def _drop(self, name: str) -> bool:
        number = self._held.number_of.pop(name, None)
        if number is None:
            return False
        self._held.alive[number] = False
        self._dead += int(self._held.sizes[number])
        return True

    def _compact(self) -> None:
        self._held = self._held.compacted()
        self._dead = 0
