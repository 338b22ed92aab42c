"""Where fingerprints stand in the segments of one space. Packed arrays in sorted tiers, merged as they grow (an LSM tree)."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dejakv.find.copied.fingerprints import Fingerprints
from dejakv.find.copied.tier import ENTRY_BYTES, Tier, merged, numbers_of, within_cap

SEGMENT_BYTES = 256
"""What the name of a segment and its place in two tables take, about."""

DEAD_SHARE = 0.25
"""Share of entries of removed segments above which the index is compacted."""


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
    """What a search sees: replaced as a whole, but for `alive`, `uses` and the end of `names`."""

    tiers: tuple[Tier, ...]
    names: list[str]
    sizes: NDArray[np.int32]
    alive: NDArray[np.bool_]
    uses: NDArray[np.uint32]


class CopiedIndex:
    """Segments by their fingerprints. Thread-safe: a search locks nothing, changes wait for one another.

    1.5 bytes an indexed token, up to a third more until removed segments are compacted away.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number_of: dict[str, int] = {}
        self._dead = 0
        self._held = _Held((), [], np.zeros(16, np.int32), np.zeros(16, np.bool_), np.zeros(16, np.uint32))

    def __len__(self) -> int:
        return len(self._number_of)

    def __contains__(self, name: object) -> bool:
        return name in self._number_of

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
            if name in self._number_of:
                return False
            held = self._held
            number = len(held.names)
            if number == len(held.alive):
                held = _grown(held)
            held.names.append(name)
            held.sizes[number] = len(found)
            held.alive[number] = True
            held.uses[number] = 0
            self._number_of[name] = number
            tiers = [*held.tiers, Tier.of(number, found).capped(held.uses)]
            while len(tiers) > 1 and len(tiers[-2]) < 2 * len(tiers[-1]):
                newer, older = (self._living(tier, held) for tier in (tiers.pop(), tiers.pop()))
                tiers.append(merged(older, newer).capped(held.uses))
            self._held = _Held(tuple(tiers), held.names, held.sizes, held.alive, held.uses)
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
            while self._number_of and (excess := self.nbytes - nbytes) > 0:
                held = self._held
                for number, name in enumerate(list(held.names)):
                    excess -= ENTRY_BYTES * int(held.sizes[number]) + SEGMENT_BYTES  # at most: some are beyond the cap
                    self._drop(name)
                    gone.append(name)
                    if excess <= 0:
                        break
                self._compact()
        return gone

    def used(self, names: Sequence[str]) -> None:
        """Notes that segments were of use: where a fingerprint has too many holders, those used most stay."""
        with self._lock:
            for name in names:
                number = self._number_of.get(name)
                if number is not None:
                    self._held.uses[number] += 1

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
        number = self._number_of.pop(name, None)
        if number is None:
            return False
        self._held.alive[number] = False
        self._dead += int(self._held.sizes[number])
        return True

    def _compact(self) -> None:
        """Leaves out the entries of removed segments and numbers the others anew, in their order."""
        held = self._held
        alive = np.flatnonzero(held.alive[: len(held.names)])
        new = np.full(len(held.names), -1, np.int64)
        new[alive] = np.arange(len(alive))
        names = [held.names[number] for number in alive.tolist()]
        room = max(16, len(alive) + len(alive) // 4)
        sizes, flags, uses = np.zeros(room, np.int32), np.zeros(room, np.bool_), np.zeros(room, np.uint32)
        sizes[: len(alive)], flags[: len(alive)], uses[: len(alive)] = held.sizes[alive], True, held.uses[alive]
        tiers = tuple(tier for tier in (tier.renumbered(new) for tier in held.tiers) if len(tier))
        self._held = _Held(tiers, names, sizes, flags, uses)
        self._number_of = {name: number for number, name in enumerate(names)}
        self._dead = 0


def _grown(held: _Held) -> _Held:
    room = np.zeros(len(held.alive), np.bool_)
    return _Held(
        held.tiers,
        held.names,
        np.concatenate([held.sizes, room.astype(np.int32)]),
        np.concatenate([held.alive, room]),
        np.concatenate([held.uses, room.astype(np.uint32)]),
    )
