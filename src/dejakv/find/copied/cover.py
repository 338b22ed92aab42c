"""The runs that cover a prompt: longest first, from donors that are used already where there is a choice."""

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dejakv.find.copied.candidates import MAX_CANDIDATES, candidates
from dejakv.find.copied.fingerprints import GUARANTEED
from dejakv.find.copied.index import CopiedIndex
from dejakv.find.copied.verify import Runs, TokensOf, verified
from dejakv.tokens import Ids


@dataclass(frozen=True)
class Run:
    """Tokens `start..start+length` of the prompt equal tokens `source..source+length` of the segment `donor`."""

    start: int
    length: int
    donor: str
    source: int


@dataclass(frozen=True)
class Cover:
    """What of a prompt stands in donors. `runs` do not overlap and are sorted by their place in the prompt.

    tokens      tokens of the prompt
    candidates  places that were compared
    dropped     places that were not, because there were too many: what they hold may be missing
    gone        donors that had left the store when they were to be compared
    """

    tokens: int
    runs: tuple[Run, ...] = ()
    candidates: int = 0
    dropped: int = 0
    gone: int = 0

    @cached_property
    def covered(self) -> int:
        """Tokens of the prompt that stand in a donor."""
        return sum(run.length for run in self.runs)

    @property
    def share(self) -> float:
        """Share of the prompt that stands in a donor, [0, 1]."""
        return self.covered / self.tokens if self.tokens else 0.0

    @cached_property
    def loads(self) -> Mapping[str, int]:
        """Rows to be loaded of each donor, the one with most first. A row that serves two places is loaded once."""
        rows: dict[str, list[tuple[int, int]]] = {}
        for run in self.runs:
            rows.setdefault(run.donor, []).append((run.source, run.source + run.length))
        loads = {donor: _union(parts) for donor, parts in rows.items()}
        return dict(sorted(loads.items(), key=lambda item: -item[1]))

    @property
    def donors(self) -> tuple[str, ...]:
        """The donors, the one with most rows first."""
        return tuple(self.loads)


def cover(
    target: Ids,
    index: CopiedIndex,
    tokens_of: TokensOf,
    least: int = GUARANTEED,
    *,
    worth: int = 1,
    most: int = MAX_CANDIDATES,
    generation_of: Callable[[str], int] = lambda _: 0,
) -> Cover:
    """Covers a prompt `[n]` with runs of at least `least` tokens that segments of the index hold.

    The run that adds most tokens comes first; of equal ones that of the least generation, then that of a donor in use, then that
    of the donor which holds most of the prompt, then the newest. What a longer run has covered is cut off; what is left is taken if it is `worth` tokens long.
    At most `most` places are compared, or one for each of the prompt's fingerprints if those are more.

    generation_of  of a segment's state (see `ChunkMeta`): 0 if it is exact

    Complete for `least >= GUARANTEED` where no fingerprint has more than `MAX_HOLDERS` holders; otherwise right, with gaps.
    """
    places, holders = candidates(target, index, most)
    if not len(places):
        return Cover(len(target), dropped=places.dropped)
    found = verified(target, places, holders.names, tokens_of, least)
    runs = [
        Run(start, stop - start, holders.names[number], start + shift)
        for start, stop, number, shift in _chosen(
            found, len(target), worth, lambda number: generation_of(holders.names[number])
        )
    ]
    runs.sort(key=lambda run: run.start)
    return Cover(len(target), tuple(runs), len(places), places.dropped, found.gone)


def _chosen(
    found: Runs, n: int, worth: int, generation_of: Callable[[int], int]
) -> Iterator[tuple[int, int, int, int]]:
    """Pieces that do not overlap: start, stop, segment number, diagonal. Greedy, over a heap in which what has been covered since
    is noticed when a run comes up."""
    donors, donor = np.unique(found.numbers, return_inverse=True)
    lengths = found.stops - found.starts
    held = np.bincount(donor, weights=lengths, minlength=len(donors)).astype(np.int64).tolist()
    rows = list(zip(found.starts.tolist(), found.stops.tolist(), donor.tolist(), found.diagonals.tolist(), strict=True))
    of_donor: list[list[int]] = [[] for _ in donors]
    for row, (_, _, which, _) in enumerate(rows):
        of_donor[which].append(row)
    generation = [generation_of(number) for number in donors.tolist()]
    # (tokens, generation, in use or not, tokens that the donor holds, age), the best first; a new donor is the higher number.
    heap = [
        (start - stop, generation[which], 1, -held[which], -which, row)
        for row, (start, stop, which, _) in enumerate(rows)
    ]
    heapq.heapify(heap)
    free = np.ones(n, np.bool_)
    used: set[int] = set()
    done: set[int] = set()
    while heap:
        gain, approximate, unused, most, age, row = heapq.heappop(heap)
        start, stop, which, shift = rows[row]
        left = int(np.count_nonzero(free[start:stop]))
        if row in done or not left:
            continue
        if left < -gain or unused != (which not in used):
            heapq.heappush(heap, (-left, approximate, int(which not in used), most, age, row))
            continue
        done.add(row)
        taken = [(a, b) for a, b in _stretches(free[start:stop], start) if b - a >= worth]
        for begin, end in taken:
            free[begin:end] = False
            yield begin, end, int(donors[which]), shift
        if taken and which not in used:
            used.add(which)
            for other in of_donor[which]:  # they now come before equal runs of others
                if other not in done:
                    begin, end, _, _ = rows[other]
                    heapq.heappush(heap, (begin - end, approximate, 0, most, age, other))


def _stretches(free: NDArray[np.bool_], start: int) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(free, prepend=False, append=False)) + start
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _union(parts: list[tuple[int, int]]) -> int:
    total = reached = 0
    for start, stop in sorted(parts):
        total += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
