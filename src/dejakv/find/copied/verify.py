"""Candidates compared token by token: runs in their full length, and nothing that is not equal."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dejakv.find.copied.candidates import Candidates
from dejakv.find.copied.fingerprints import K
from dejakv.tokens import Ids

TokensOf = Callable[[str], NDArray[np.int64] | None]
"""Token ids of a segment by its name, pictures' as `with_media` gives them; None for one that is gone."""

STEP = 1024
"""Tokens compared at once beyond a candidate's window; doubled while they are equal."""

EXTENDED = 1 << 20
"""Tokens compared beyond windows for one prompt, and 16 for each of its tokens. Runs that are not followed further are
shorter than they might be, and still right. Only fingerprints with too many holders need any."""


@dataclass(frozen=True)
class Runs:
    """Equal runs: `[r]` each. `starts`, `stops` in the prompt; `diagonals`: place in the segment less place in the prompt.

    gone  segments that were found and no longer have tokens
    """

    numbers: Ids
    diagonals: Ids
    starts: Ids
    stops: Ids
    gone: int = 0

    def __len__(self) -> int:
        return len(self.numbers)


def verified(target: Ids, found: Candidates, names: Sequence[str], tokens_of: TokensOf, least: int) -> Runs:
    """The longest runs of at least `least` tokens around the candidates, each once."""
    held: dict[int, NDArray[np.int64]] = {}
    gone = 0
    lengths = np.zeros(len(found), np.int64)
    for number, start, stop in _by_segment(found.numbers):
        tokens = tokens_of(names[number])
        if tokens is None:
            gone += 1
            continue
        held[number] = np.asarray(tokens)  # a slice of a memory map takes several times as long
        lengths[start:stop] = len(tokens)
    stops = np.minimum(found.stop, lengths - found.diagonals)
    there = np.flatnonzero(stops - found.first >= K)
    numbers, diagonals = found.numbers[there], found.diagonals[there]
    which, starts, stops = _equal(target, held, numbers, diagonals, found.first[there], stops[there])
    inside = (starts > found.first[there][which]) & (stops < np.minimum(found.stop[there], len(target))[which])
    numbers, diagonals = numbers[which], diagonals[which]
    _follow(target, held, numbers, diagonals, starts, stops, np.flatnonzero(~inside))
    order = np.lexsort((starts, diagonals, numbers))
    numbers, diagonals, starts, stops = numbers[order], diagonals[order], starts[order], stops[order]
    again = np.zeros(len(order), np.bool_)
    again[1:] = (np.diff(numbers) == 0) & (np.diff(diagonals) == 0) & (starts[1:] < stops[:-1])
    kept = ~again & (stops - starts >= least)
    return Runs(numbers[kept], diagonals[kept], starts[kept], stops[kept], gone)


def _by_segment(numbers: Ids) -> Iterator[tuple[int, int, int]]:
    """Stretches of one number in sorted numbers: number, start, stop."""
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    return zip(numbers[starts].tolist(), starts.tolist(), np.append(starts, len(numbers))[1:].tolist(), strict=True)


def _equal(
    target: Ids, held: dict[int, NDArray[np.int64]], numbers: Ids, diagonals: Ids, first: Ids, stop: Ids
) -> tuple[Ids, Ids, Ids]:
    """Runs of at least `K` equal tokens within windows: which window, start and stop in the prompt."""
    ends = np.cumsum(stop - first)
    begins = ends - (stop - first)
    same = np.empty(int(ends[-1]) if len(ends) else 0, np.bool_)
    columns = (numbers, diagonals, first, stop, begins, ends)
    windows = zip(*(column.tolist() for column in columns), strict=True)
    for number, shift, low, high, begin, end in windows:
        np.equal(held[number][low + shift : high + shift], target[low:high], out=same[begin:end])
    # A run begins where a token is equal and the one before, in the same window, is not.
    opens, closes = same.copy(), same.copy()
    opens[1:] &= ~same[:-1]
    closes[:-1] &= ~same[1:]
    opens[begins] = same[begins]
    closes[ends - 1] = same[ends - 1]
    starts, lasts = np.flatnonzero(opens), np.flatnonzero(closes)
    long = lasts - starts >= K - 1
    starts, lasts = starts[long], lasts[long]
    window = np.searchsorted(ends, starts, side="right")
    moved = (first - begins)[window]
    return window, starts + moved, lasts + moved + 1


def _follow(
    target: Ids, held: dict[int, NDArray[np.int64]], numbers: Ids, diagonals: Ids, starts: Ids, stops: Ids, which: Ids
) -> None:
    """Lengthens runs that reach the edge of their window, in place."""
    left = EXTENDED + 16 * len(target)
    for run in which.tolist():
        if left <= 0:
            return
        theirs, shift = held[int(numbers[run])], int(diagonals[run])
        start, stop = int(starts[run]), int(stops[run])
        low, high = max(0, -shift), min(len(target), len(theirs) - shift)
        stop = _forward(target[stop:high], theirs[stop + shift : high + shift]) + stop
        start -= _forward(target[low:start][::-1], theirs[low + shift : start + shift][::-1])
        left -= stop - start - int(stops[run] - starts[run]) + STEP
        starts[run], stops[run] = start, stop


def _forward(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """How many tokens are equal from the beginning."""
    if not len(one) or one[0] != other[0]:
        return 0
    done, step = 0, STEP
    while done < len(one):
        differs = one[done : done + step] != other[done : done + step]
        first = int(differs.argmax())
        if differs[first]:
            return done + first
        done += step
        step *= 2
    return len(one)
