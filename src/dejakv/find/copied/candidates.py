"""Places that may begin a run: fingerprints of a prompt that stand at one distance from those of a segment, joined."""

from dataclasses import dataclass

import numpy as np

from dejakv.find.copied.fingerprints import GUARANTEED, WINDOW, K, fingerprints
from dejakv.find.copied.index import CopiedIndex, Holders
from dejakv.tokens import Ids

MAX_CANDIDATES = 2048
"""Candidates that are verified for a prompt, or one for each of its fingerprints if there are more of those."""


@dataclass(frozen=True)
class Candidates:
    """Windows of the prompt that may hold runs: `[c]` each, sorted by segment and diagonal.

    numbers    segment
    diagonals  place in the segment less place in the prompt
    first, stop  the window in the prompt; it reaches beyond the fingerprints as far as a run can
    dropped    candidates beyond the bound
    """

    numbers: Ids
    diagonals: Ids
    first: Ids
    stop: Ids
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def only(self, kept: Ids, dropped: int = 0) -> "Candidates":
        return Candidates(
            self.numbers[kept], self.diagonals[kept], self.first[kept], self.stop[kept], self.dropped + dropped
        )


def candidates(target: Ids, index: CopiedIndex, most: int) -> tuple[Candidates, Holders]:
    """Candidates for the runs of a prompt, and the holders they are of."""
    found = fingerprints(target)
    by_key = np.argsort(found.keys, kind="stable")
    keys, first, count = np.unique(found.keys[by_key], return_index=True, return_counts=True)
    holders = index.holders(keys)
    # Each holder with each place of its fingerprint in the prompt.
    times = count[holders.keys]
    holder = np.repeat(np.arange(len(holders.keys)), times)
    nth = np.arange(len(holder)) - np.repeat(np.cumsum(times) - times, times)
    place = found.positions[by_key[first[holders.keys[holder]] + nth]]
    joined = _joined(holders.numbers[holder], holders.positions[holder] - place, place, len(target))
    return _bounded(joined, max(most, len(found))), holders


def _joined(numbers: Ids, diagonals: Ids, places: Ids, n: int) -> Candidates:
    """Windows of one diagonal that touch are one. A run goes on for less than a window beyond its outer fingerprints."""
    if not len(numbers):
        return Candidates(numbers, diagonals, places, places)
    order = _order(numbers, diagonals, places, n)
    numbers, diagonals, places = numbers[order], diagonals[order], places[order]
    apart = (np.diff(numbers) != 0) | (np.diff(diagonals) != 0) | (np.diff(places) > GUARANTEED + WINDOW - 1)
    starts = np.concatenate([[0], np.flatnonzero(apart) + 1])
    ends = np.append(starts[1:], len(order)) - 1
    first = np.maximum(places[starts] - (WINDOW - 1), np.maximum(0, -diagonals[starts]))
    stop = np.minimum(places[ends] + K + (WINDOW - 1), n)
    return Candidates(numbers[starts], diagonals[starts], first, stop)


def _order(numbers: Ids, diagonals: Ids, places: Ids, n: int) -> Ids:
    """Sorted by segment, diagonal and place: as one number where it fits, which takes a fifth of the time."""
    lowest, low = int(numbers.min()), int(diagonals.min())
    width = int(diagonals.max()) - low + 1
    if (int(numbers.max()) - lowest + 1) * width * n >= 1 << 63:
        return np.lexsort((places, diagonals, numbers))
    return np.argsort(((numbers - lowest) * width + (diagonals - low)) * n + places)


def _bounded(found: Candidates, most: int) -> Candidates:
    """At most so many: for every place of the prompt the longest candidate that begins there, then the second longest, ..."""
    if len(found) <= most:
        return found
    order = np.lexsort((-found.numbers, found.first - found.stop, found.first))
    begin = found.first[order]
    rank = np.empty(len(found), np.int64)
    rank[order] = np.arange(len(found)) - np.searchsorted(begin, begin)
    kept = np.sort(np.lexsort((found.first - found.stop, rank))[:most])
    return found.only(kept, len(found) - most)
