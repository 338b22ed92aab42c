"""Index of the places of fingerprints in the segments of one space.

Packed arrays stand in sorted tiers, which are merged as they grow (an LSM tree).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.decide.copied.fingerprints import TextFingerprints

Entries = NDArray[np.uint64]

MAX_HOLDERS = 16
"""Maximum places of one fingerprint. The newest stay."""

GROWTH = 8
"""Least ratio of the sizes of a tier and the next.

A larger ratio means fewer tiers to search and more merging.
"""

DEAD_SHARE = 0.25
"""Share of entries of removed segments above which the index is compacted."""

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@dataclass(frozen=True)
class FingerprintTier:
    """Sorted places of fingerprints.

    Attributes
    ----------
    entries : uint64 array, shape [m]
        Fingerprint in the upper half and number of the segment in the lower, sorted. A higher
        number is newer.
    positions : uint32 array, shape [m]
        Place in the segment.
    """

    entries: Entries
    positions: NDArray[np.uint32]

    @classmethod
    def of_segments(cls, first: int, prints: Sequence[TextFingerprints]) -> "FingerprintTier":
        """Make a tier of the fingerprints of segments that are numbered from `first` on."""
        keys = np.concatenate([each.keys for each in prints]).astype(np.uint64)
        numbers = np.repeat(
            np.arange(first, first + len(prints), dtype=np.uint64), [len(each) for each in prints]
        )

        entries = (keys << _HALF) | numbers
        order = np.argsort(entries, kind="stable")
        return cls(
            entries[order],
            np.concatenate([each.positions for each in prints])[order].astype(np.uint32),
        )

    def __len__(self) -> int:
        return len(self.entries)

    def ranges(self, keys: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first place and the number of places of each key; sorted keys are quickest."""
        low = keys.astype(np.uint64) << _HALF
        first = np.searchsorted(self.entries, low)
        return first, np.searchsorted(self.entries, low | _LOW, side="right") - first

    def only(self, mask: NDArray[np.bool_]) -> "FingerprintTier":
        """Return a tier with the places in `mask`."""
        return self if mask.all() else FingerprintTier(self.entries[mask], self.positions[mask])

    def renumbered(self, new: NDArray[np.int64]) -> "FingerprintTier":
        """Return a copy with `new[number]` for each number, without the places where that is -1.

        The order of numbers must stay the same.
        """
        numbers = new[numbers_of(self.entries)]
        mask = numbers >= 0
        entries = (self.entries[mask] & ~_LOW) | numbers[mask].astype(np.uint64)
        return FingerprintTier(entries, self.positions[mask])

    def capped(self) -> "FingerprintTier":
        """Return a tier with at most `MAX_HOLDERS` places for each fingerprint."""
        return self.only(newest_places(self.entries >> _HALF))


def numbers_of(entries: Entries) -> NDArray[np.int64]:
    """Return the segment number of each entry."""
    return (entries & _LOW).astype(np.int64)


def merged(older: FingerprintTier, newer: FingerprintTier) -> FingerprintTier:
    """Merge two tiers. The larger is copied once and never sorted."""
    large, small = (older, newer) if len(older) >= len(newer) else (newer, older)
    places = np.searchsorted(large.entries, small.entries) + np.arange(len(small))
    rest = np.ones(len(large) + len(small), np.bool_)
    rest[places] = False
    entries = np.empty(len(rest), np.uint64)
    positions = np.empty(len(rest), np.uint32)

    for into, tier in ((places, small), (rest, large)):
        entries[into] = tier.entries
        positions[into] = tier.positions

    return FingerprintTier(entries, positions)


def newest_places(keys: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the newest `MAX_HOLDERS` places of each key.

    The keys are sorted, and places of equal keys by age.
    """
    mask = np.ones(len(keys), np.bool_)

    # A place stays unless the one `MAX_HOLDERS` behind it has the same key.
    mask[:-MAX_HOLDERS] = keys[MAX_HOLDERS:] != keys[:-MAX_HOLDERS]
    return mask


@dataclass(frozen=True)
class FingerprintPlaces:
    """Places where fingerprints stand, sorted by key and then number.

    Attributes
    ----------
    keys : int64 array, shape [c]
        Index among the requested keys.
    numbers : int64 array, shape [c]
        Segment of each place, an index into `names`. A higher number is newer.
    positions : int64 array, shape [c]
        Place in the segment.
    names : Sequence[str]
        Names of the segments by number.
    """

    keys: NDArray[np.int64]
    numbers: NDArray[np.int64]
    positions: NDArray[np.int64]
    names: Sequence[str]


class CopiedIndex:
    """Index of segments by their fingerprints.

    It takes 12 bytes a place, which is 1.5 bytes an indexed token, up to a third more until removed
    segments are compacted away, and at most twice as much while tiers are merged.
    """

    def __init__(self) -> None:
        self._tiers: list[FingerprintTier] = []
        self._names: list[str] = []
        """By number, removed ones included until they are compacted away."""
        self._number_of: dict[str, int] = {}
        self._dead = 0
        # By number, with room: places added, and whether it is still held.
        self._sizes = np.zeros(16, np.int32)
        self._alive = np.zeros(16, np.bool_)

    def __len__(self) -> int:
        return len(self._number_of)

    @property
    def entries(self) -> int:
        """Number of places, with those of removed segments until they are compacted away."""
        return sum(len(tier) for tier in self._tiers)

    def add(self, segments: Mapping[str, TextFingerprints]) -> list[str]:
        """Index segments by name, the oldest first.

        Returns
        -------
        list[str]
            Names that are new, of segments with fingerprints.
        """
        names = [
            name for name, prints in segments.items() if len(prints) and name not in self._number_of
        ]
        if not names:
            return names

        first, stop = len(self._names), len(self._names) + len(names)
        if stop > len(self._alive):
            # Doubled, so that adding one by one takes linear time.
            room = (0, max(first, stop - len(self._alive)))
            self._sizes, self._alive = np.pad(self._sizes, room), np.pad(self._alive, room)
        self._sizes[first:stop], self._alive[first:stop] = (
            [len(segments[name]) for name in names],
            True,
        )
        self._names += names
        self._number_of.update(zip(names, range(first, stop), strict=True))

        tiers = self._tiers
        tiers.append(
            FingerprintTier.of_segments(first, [segments[name] for name in names]).capped()
        )
        # Small tiers are merged until each is much larger than the next, so that few are searched.
        while len(tiers) > 1 and len(tiers[-2]) < GROWTH * len(tiers[-1]):
            newer, older = self._without_dead(tiers.pop()), self._without_dead(tiers.pop())
            tiers.append(merged(older, newer).capped())
        return names

    def remove(self, name: str) -> bool:
        """Remove a segment; False for an unknown one.

        Its memory is freed by the next compaction.
        """
        number = self._number_of.pop(name, None)
        if number is None:
            return False
        self._alive[number] = False
        self._dead += int(self._sizes[number])
        if self._dead > DEAD_SHARE * self.entries:
            self._compact()
        return True

    def holders(self, keys: NDArray[np.uint32]) -> FingerprintPlaces:
        """Return the places of fingerprints (sorted, each once), of each the newest 16 at most."""
        nothing = np.empty(0, np.int64)
        key_parts, numbers, positions = [nothing], [nothing], [nothing]
        for tier in self._tiers:
            first, count = tier.ranges(keys)
            # Ranges of all keys as one array of places, without a loop.
            skip = np.cumsum(count) - count
            places = np.arange(int(count.sum())) + np.repeat(first - skip, count)
            key_parts.append(np.repeat(np.arange(len(keys)), count))
            numbers.append(numbers_of(tier.entries[places]))
            positions.append(tier.positions[places].astype(np.int64))

        key, number, position = (
            np.concatenate(key_parts),
            np.concatenate(numbers),
            np.concatenate(positions),
        )

        alive = self._alive[number]
        key, number, position = key[alive], number[alive], position[alive]
        # Tiers follow each other in age, so sorting by key alone leaves numbers in order. numpy
        # sorts 16 bits in linear time.
        order = np.argsort(key.astype(np.uint16) if len(keys) <= 1 << 16 else key, kind="stable")

        order = order[newest_places(key[order])]
        return FingerprintPlaces(key[order], number[order], position[order], self._names)

    def _without_dead(self, tier: FingerprintTier) -> FingerprintTier:
        """Return a tier without places of removed segments, which must not count as holders."""
        return tier.only(self._alive[numbers_of(tier.entries)]) if self._dead else tier

    def _compact(self) -> None:
        """Renumber the remaining segments in their order, and drop the places of removed ones."""
        alive = np.flatnonzero(self._alive[: len(self._names)])
        new = np.full(len(self._names), -1, np.int64)
        new[alive] = np.arange(len(alive))

        self._names = [self._names[number] for number in alive.tolist()]
        self._number_of = {name: number for number, name in enumerate(self._names)}
        self._tiers = [tier for tier in (tier.renumbered(new) for tier in self._tiers) if len(tier)]
        # With some room, or the next segment would copy both arrays again.
        room = (0, max(16, len(alive) + len(alive) // 4) - len(alive))
        self._sizes, self._alive = (
            np.pad(self._sizes[alive], room),
            np.pad(self._alive[alive], room),
        )
        self._dead = 0
