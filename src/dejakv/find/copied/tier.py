"""A sorted, immutable part of an index: places of fingerprints in packed arrays, 12 bytes each."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.find.copied.fingerprints import Fingerprints

Entries = NDArray[np.uint64]

MAX_HOLDERS = 16
"""Places kept for one fingerprint."""

ENTRY_BYTES = 12
"""Memory of one place."""

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class Tier:
    """entries    `[m]` sorted: fingerprint (upper half) and segment number (lower half, higher is newer)
    positions  `[m]` uint32: where in the segment
    """

    entries: Entries
    positions: NDArray[np.uint32]

    @classmethod
    def of(cls, number: int, found: Fingerprints) -> "Tier":
        """The places of one segment's fingerprints."""
        order = np.argsort(found.keys, kind="stable")
        entries = (found.keys[order].astype(np.uint64) << _HALF) | np.uint64(number)
        return cls(entries, found.positions[order].astype(np.uint32))

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes + self.positions.nbytes

    def ranges(self, keys: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First place and number of places of each key; sorted keys are quickest."""
        low = keys.astype(np.uint64) << _HALF
        first = np.searchsorted(self.entries, low)
        return first, np.searchsorted(self.entries, low | _LOW, side="right") - first

    def only(self, kept: NDArray[np.bool_]) -> "Tier":
        return self if kept.all() else Tier(self.entries[kept], self.positions[kept])

    def renumbered(self, new: NDArray[np.int64]) -> "Tier":
        """With `new[number]` for each number; -1 drops its places. The order of numbers must stay."""
        numbers = new[numbers_of(self.entries)]
        kept = numbers >= 0
        entries = (self.entries[kept] & ~_LOW) | numbers[kept].astype(np.uint64)
        return Tier(entries, self.positions[kept])

    def capped(self, uses: NDArray[np.uint32]) -> "Tier":
        """With at most `MAX_HOLDERS` places a fingerprint."""
        return self.only(within_cap(self.entries >> _HALF, numbers_of(self.entries), uses))


def numbers_of(entries: Entries) -> NDArray[np.int64]:
    """Segment number of each entry."""
    return (entries & _LOW).astype(np.int64)


def merged(older: Tier, newer: Tier) -> Tier:
    """One tier of two. The larger one is copied once and never sorted."""
    large, small = (older, newer) if len(older) >= len(newer) else (newer, older)
    places = np.searchsorted(large.entries, small.entries) + np.arange(len(small))
    rest = np.ones(len(large) + len(small), np.bool_)
    rest[places] = False
    entries = np.empty(len(rest), np.uint64)
    positions = np.empty(len(rest), np.uint32)
    for into, tier in ((places, small), (rest, large)):
        entries[into] = tier.entries
        positions[into] = tier.positions
    return Tier(entries, positions)


def within_cap(keys: NDArray[Any], numbers: NDArray[np.int64], uses: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Which places stay if a fingerprint keeps `MAX_HOLDERS`: up to half of them places in the segments used most, the others the
    newest. Sorted by key, then number; `uses[number]` tells how often a segment was used."""
    kept = np.ones(len(keys), np.bool_)
    if len(keys) <= MAX_HOLDERS or not (keys[MAX_HOLDERS:] == keys[:-MAX_HOLDERS]).any():
        return kept
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    lengths = np.diff(starts, append=len(keys))
    crowded = lengths > MAX_HOLDERS
    many = np.flatnonzero(np.repeat(crowded, lengths))
    lengths = lengths[crowded]
    group = np.repeat(np.arange(len(lengths)), lengths)
    favoured = _most_used(group, uses[numbers[many]])
    room = MAX_HOLDERS - np.bincount(group[favoured], minlength=len(lengths))
    others = np.cumsum(~favoured)
    newer = others[np.cumsum(lengths) - 1][group] - others
    kept[many] = favoured | (newer < room[group])
    return kept


def _most_used(group: NDArray[np.int64], uses: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """The half of `MAX_HOLDERS` of each group used most, of equally used ones the newest; fewer where fewer were used."""
    favoured = np.zeros(len(group), np.bool_)
    used = np.flatnonzero(uses)
    order = used[np.lexsort((-used, -uses[used].astype(np.int64), group[used]))]
    rank = np.arange(len(order)) - np.searchsorted(group[order], group[order])
    favoured[order[rank < MAX_HOLDERS // 2]] = True
    return favoured
