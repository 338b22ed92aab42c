"""Runs of equal tokens between a prompt and indexed segments.

Fingerprints propose runs, tokens are compared one by one, and the longest runs cover the prompt.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from dejakv.decide.copied.fingerprints import (
    SHORTEST_FINDABLE_RUN,
    WINDOW,
    Ids,
    K,
    TextFingerprints,
    fingerprints,
    fingerprints_of_all,
    media_token_ids,
    stretches,
)
from dejakv.decide.copied.foreign import ForeignContext
from dejakv.decide.copied.index import CopiedIndex, FingerprintPlaces
from dejakv.request import Prepared
from dejakv.store.base import StateInfo
from dejakv.store.store import Store

MAX_CANDIDATES = 2048
"""Maximum candidates that are verified for a prompt.

A prompt with more fingerprints than these gets one candidate for each.
"""

TokensOf = Callable[[str], NDArray[np.int64] | None]
"""Function from a segment's name to its token ids, those of media as in `media_token_ids`.

It returns None for a segment that has left.
"""

STEP = 1024
"""Tokens that are compared at once beyond a candidate's window, doubled while they are equal."""

EXTENDED = 1 << 20
"""Tokens that are compared beyond windows for one prompt, and 16 more for each of its tokens.

Beyond that, runs are shorter than they might be. Only fingerprints with too many holders need any.
"""


@dataclass(frozen=True)
class TokenRun:
    """A run of equal tokens in the prompt and a segment.

    Tokens `start..start+length` of the prompt equal tokens `source..source+length` of the segment
    `donor`.
    """

    start: int
    length: int
    donor: str
    source: int


@dataclass(frozen=True)
class DonorCover:
    """The part of a prompt that its donors have.

    Attributes
    ----------
    tokens : int
        Tokens of the prompt.
    runs : tuple[TokenRun, ...]
        Runs that do not overlap, by their place in the prompt.
    candidates : int
        Number of places that were compared.
    """

    tokens: int
    runs: tuple[TokenRun, ...] = ()
    candidates: int = 0

    @cached_property
    def covered(self) -> int:
        """Number of the prompt's tokens in donors."""
        return sum(run.length for run in self.runs)

    @cached_property
    def donors(self) -> tuple[str, ...]:
        """Names of the donors, the one with most of the prompt first."""
        tokens_by_donor = Counter[str]()
        for run in self.runs:
            tokens_by_donor[run.donor] += run.length
        return tuple(donor for donor, _ in tokens_by_donor.most_common())


@dataclass(frozen=True)
class CandidateWindows:
    """Stretches of the prompt and the segments that they may be equal to.

    All arrays are `[w]`, sorted by segment and diagonal.

    Attributes
    ----------
    numbers : Ids
        Number of the segment.
    diagonals : Ids
        Place in the segment less place in the prompt.
    starts, stops : Ids
        The stretch in the prompt.
    """

    numbers: Ids
    diagonals: Ids
    starts: Ids
    stops: Ids

    def __len__(self) -> int:
        return len(self.numbers)

    def only(self, mask: NDArray[Any]) -> "CandidateWindows":
        """Return the windows in `mask`, a mask or indices."""
        return CandidateWindows(
            self.numbers[mask], self.diagonals[mask], self.starts[mask], self.stops[mask]
        )


def candidates(
    target: Ids, index: CopiedIndex, max_windows: int
) -> tuple[CandidateWindows, FingerprintPlaces]:
    """Return the windows of the prompt that segments may be equal to.

    Fingerprints at one distance in a prompt and a segment are joined to windows that reach as far
    as a run can.

    Parameters
    ----------
    target : Ids, shape [n]
        Tokens of the prompt.
    index : CopiedIndex
        Index of the segments.
    max_windows : int
        Maximum windows. A prompt with more fingerprints gets one window for each.

    Returns
    -------
    CandidateWindows
        The windows.
    FingerprintPlaces
        Holders of the prompt's fingerprints.
    """
    prints = fingerprints(target)
    by_key = np.argsort(prints.keys, kind="stable")
    keys, first, count = np.unique(prints.keys[by_key], return_index=True, return_counts=True)

    holders = index.holders(keys)
    # Each holder with each place of its fingerprint in the prompt.
    times = count[holders.keys]
    holder = np.repeat(np.arange(len(holders.keys)), times)
    nth = np.arange(len(holder)) - np.repeat(np.cumsum(times) - times, times)
    place = prints.positions[by_key[first[holders.keys[holder]] + nth]]
    joined = _join_windows(
        holders.numbers[holder], holders.positions[holder] - place, place, len(target)
    )
    # At least one for each fingerprint, or parts of a long prompt would have none.
    return _limit_windows(joined, max(max_windows, len(prints))), holders


def _join_windows(numbers: Ids, diagonals: Ids, places: Ids, n: int) -> CandidateWindows:
    """Join touching windows of one diagonal.

    A run extends less than a window beyond its outer fingerprints.
    """
    if not len(numbers):
        return CandidateWindows(numbers, diagonals, places, places)
    order = _order(numbers, diagonals, places, n)
    numbers, diagonals, places = numbers[order], diagonals[order], places[order]

    apart = (
        (np.diff(numbers) != 0)
        | (np.diff(diagonals) != 0)
        | (np.diff(places) > SHORTEST_FINDABLE_RUN + WINDOW - 1)
    )

    starts = np.concatenate([[0], np.flatnonzero(apart) + 1])
    ends = np.append(starts[1:], len(order)) - 1
    first = np.maximum(places[starts] - (WINDOW - 1), np.maximum(0, -diagonals[starts]))
    stop = np.minimum(places[ends] + K + (WINDOW - 1), n)
    return CandidateWindows(numbers[starts], diagonals[starts], first, stop)


def _order(numbers: Ids, diagonals: Ids, places: Ids, n: int) -> Ids:
    """Return the order by segment, diagonal and place.

    The three are sorted as one number where it fits, which takes a fifth of the time.
    """
    lowest, low = int(numbers.min()), int(diagonals.min())
    width = int(diagonals.max()) - low + 1
    # Beyond 64 bits the single number would wrap around.
    if (int(numbers.max()) - lowest + 1) * width * n >= 1 << 63:
        return np.lexsort((places, diagonals, numbers))
    return np.argsort(((numbers - lowest) * width + (diagonals - low)) * n + places)


def _limit_windows(windows: CandidateWindows, max_windows: int) -> CandidateWindows:
    """Return at most `max_windows` windows.

    For every place of the prompt the longest that begins there is taken, then the second longest,
    and so on.
    """
    if len(windows) <= max_windows:
        return windows
    order = np.lexsort((-windows.numbers, windows.starts - windows.stops, windows.starts))
    begin = windows.starts[order]
    rank = np.empty(len(windows), np.int64)

    # How many longer ones begin at the same place.
    rank[order] = np.arange(len(windows)) - np.searchsorted(begin, begin)
    return windows.only(np.sort(np.lexsort((windows.starts - windows.stops, rank))[:max_windows]))


def verify_windows(
    target: Ids, windows: CandidateWindows, names: Sequence[str], tokens_of: TokensOf
) -> CandidateWindows:
    """Return the longest runs of equal tokens around windows, each once.

    Runs of fewer than `SHORTEST_FINDABLE_RUN` tokens are left out.

    Parameters
    ----------
    target : Ids, shape [n]
        Tokens of the prompt.
    windows : CandidateWindows
        Windows to compare.
    names : Sequence[str]
        Names of the segments by number.
    tokens_of : TokensOf
        Function that reads a segment's tokens. Segments without tokens have no runs.
    """
    tokens_by_number: dict[int, NDArray[np.int64]] = {}
    lengths = np.zeros(len(windows), np.int64)
    for number, start, stop in _by_segment(windows.numbers):
        tokens = tokens_of(names[number])
        if tokens is not None:
            # A slice of a memory map takes several times as long as one of an array.
            tokens_by_number[number] = np.asarray(tokens)
            lengths[start:stop] = len(tokens)
    # A segment may be shorter than the window, or have left: then its length is 0.
    stops = np.minimum(windows.stops, lengths - windows.diagonals)
    long_enough = stops - windows.starts >= K
    windows = windows.only(long_enough)

    run_windows, starts, stops = _equal_runs(target, tokens_by_number, windows, stops[long_enough])
    windows = windows.only(run_windows)
    # A run that ends inside of its window is whole: it has been seen to differ on both sides.
    inside = (starts > windows.starts) & (stops < np.minimum(windows.stops, len(target)))
    runs = CandidateWindows(windows.numbers, windows.diagonals, starts, stops)
    _extend_runs(target, tokens_by_number, runs, np.flatnonzero(~inside))

    runs = runs.only(np.lexsort((starts, windows.diagonals, windows.numbers)))

    # Two windows of one diagonal may have grown into the same run.
    again = np.zeros(len(runs), np.bool_)
    again[1:] = (
        (np.diff(runs.numbers) == 0)
        & (np.diff(runs.diagonals) == 0)
        & (runs.starts[1:] < runs.stops[:-1])
    )
    return runs.only(~again & (runs.stops - runs.starts >= SHORTEST_FINDABLE_RUN))


def _by_segment(numbers: Ids) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and stop of each stretch of one number in sorted numbers."""
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    return zip(
        numbers[starts].tolist(),
        starts.tolist(),
        np.append(starts, len(numbers))[1:].tolist(),
        strict=True,
    )


def _equal_runs(
    target: Ids, tokens_by_number: dict[int, Ids], windows: CandidateWindows, stops: Ids
) -> tuple[Ids, Ids, Ids]:
    """Return runs of at least `K` equal tokens within windows that end at `stops`.

    Returns
    -------
    window, start, stop : Ids
        Index of the window, and start and stop in the prompt, for each run.
    """
    first = windows.starts
    ends = np.cumsum(stops - first)
    begins = ends - (stops - first)
    same = np.empty(int(ends[-1]) if len(ends) else 0, np.bool_)
    columns = (windows.numbers, windows.diagonals, first, stops, begins, ends)
    for number, shift, low, high, begin, end in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        np.equal(
            tokens_by_number[number][low + shift : high + shift],
            target[low:high],
            out=same[begin:end],
        )

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

    # From places in the joined array back to places in the prompt.
    moved = (first - begins)[window]
    return window, starts + moved, lasts + moved + 1


def _extend_runs(
    target: Ids, tokens_by_number: dict[int, Ids], runs: CandidateWindows, run_indexes: Ids
) -> None:
    """Lengthen runs that reach the edge of their window, in place."""
    token_budget = EXTENDED + 16 * len(target)
    for run in run_indexes.tolist():
        if token_budget <= 0:
            return
        donor_tokens, shift = tokens_by_number[int(runs.numbers[run])], int(runs.diagonals[run])
        start, stop = int(runs.starts[run]), int(runs.stops[run])
        low, high = max(0, -shift), min(len(target), len(donor_tokens) - shift)

        after = _equal_length(target[stop:high], donor_tokens[stop + shift : high + shift])
        before = _equal_length(
            target[low:start][::-1], donor_tokens[low + shift : start + shift][::-1]
        )

        # `STEP` for the call itself, so that many short runs come to an end too.
        token_budget -= before + after + STEP
        runs.starts[run], runs.stops[run] = start - before, stop + after


def _equal_length(target: NDArray[np.int64], source: NDArray[np.int64]) -> int:
    """Count the tokens that are equal from the beginning."""
    # The common case, without an array.
    if not len(target) or target[0] != source[0]:
        return 0
    done, step = 0, STEP
    while done < len(target):
        differs = target[done : done + step] != source[done : done + step]
        first = int(differs.argmax())
        if differs[first]:
            return done + first
        done += step
        step *= 2
    return len(target)


def cover(
    target: Ids,
    index: CopiedIndex,
    tokens_of: TokensOf,
    *,
    max_windows: int = MAX_CANDIDATES,
    generation_of: Callable[[str], int] = lambda _: 0,
) -> DonorCover:
    """Cover a prompt `[n]` with runs of at least `SHORTEST_FINDABLE_RUN` tokens from the index.

    The choice is greedy by tokens added. Ties go to the least blend depth, then a donor in use,
    then the donor of most tokens, then the newest. The cover is complete unless a fingerprint has
    more than `MAX_HOLDERS` holders, or the prompt more candidates than `max_windows`. Then it is
    correct, with gaps.

    Parameters
    ----------
    target : Ids, shape [n]
        Ids of the prompt.
    index : CopiedIndex
        Index of the segments.
    tokens_of : TokensOf
        Function that reads a segment's tokens.
    max_windows : int
        Maximum places compared; at least one for each fingerprint of the prompt.
    generation_of : Callable[[str], int]
        Depth of a segment's state (see `StateInfo.generation`), 0 for exact state.

    Examples
    --------
    >>> passage, index = np.arange(100), CopiedIndex()
    >>> index.add({"donor": fingerprints(passage)})
    ['donor']
    >>> found = cover(np.concatenate([[7, 7], passage[20:80]]), index, {"donor": passage}.get)
    >>> found.runs
    (TokenRun(start=2, length=60, donor='donor', source=20),)
    >>> found.donors, found.covered
    (('donor',), 60)
    """
    places, holders = candidates(target, index, max_windows)
    names = holders.names
    verified_runs = verify_windows(target, places, names, tokens_of)
    chosen = _choose_runs(verified_runs, len(target), lambda number: generation_of(names[number]))
    runs = [
        TokenRun(start, stop - start, names[number], start + shift)
        for start, stop, number, shift in chosen
    ]
    return DonorCover(len(target), tuple(sorted(runs, key=lambda run: run.start)), len(places))


def _choose_runs(
    windows: CandidateWindows, n: int, generation_of: Callable[[int], int]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield start, stop, segment number and diagonal of pieces that do not overlap.

    A run's gain is counted again when it comes up.
    """
    donors, donor = np.unique(windows.numbers, return_inverse=True)
    lengths = windows.stops - windows.starts
    donor_tokens = (
        np.bincount(donor, weights=lengths, minlength=len(donors)).astype(np.int64).tolist()
    )
    rows = list(
        zip(
            windows.starts.tolist(),
            windows.stops.tolist(),
            donor.tolist(),
            windows.diagonals.tolist(),
            strict=True,
        )
    )
    of_donor: list[list[int]] = [[] for _ in donors]
    for row, (_, _, donor_index, _) in enumerate(rows):
        of_donor[donor_index].append(row)

    generation = [generation_of(number) for number in donors.tolist()]
    # (tokens, generation, in use or not, tokens that the donor holds, age), the best first. A newer
    # donor has the higher number.
    heap = [
        (start - stop, generation[donor_index], 1, -donor_tokens[donor_index], -donor_index, row)
        for row, (start, stop, donor_index, _) in enumerate(rows)
    ]

    heapq.heapify(heap)
    free = np.ones(n, np.bool_)
    used: set[int] = set()
    done: set[int] = set()

    while heap:
        gain, approximate, unused, donor_total, age, row = heapq.heappop(heap)
        start, stop, donor_index, shift = rows[row]

        uncovered = int(np.count_nonzero(free[start:stop]))
        if row in done or not uncovered:
            continue
        # Its place in the heap is out of date: it goes back with what it is worth now.
        if uncovered < -gain or unused != (donor_index not in used):
            heapq.heappush(
                heap, (-uncovered, approximate, int(donor_index not in used), donor_total, age, row)
            )
            continue

        # Only what is still free: longer runs have taken the rest.
        done.add(row)
        whole = uncovered == stop - start
        for begin, length in ((0, uncovered),) if whole else stretches(free[start:stop]):
            yield start + begin, start + begin + length, int(donors[donor_index]), shift
        free[start:stop] = False
        if donor_index not in used:
            used.add(donor_index)
            # This donor's other runs now come before equal runs of others.
            for donor_row in of_donor[donor_index]:
                if donor_row not in done:
                    begin, end, _, _ = rows[donor_row]
                    heapq.heappush(heap, (begin - end, approximate, 0, donor_total, age, donor_row))


TOKEN_CACHE_BYTES = 16 << 20
"""Bytes of token ids of a space's most compared segments: 500 prompts of 4,000 tokens.

With a quarter of it, lookups of 64 prompts of 8,000 tokens at once spent most of their time in
making arrays of the same 85 donors.
"""


def fingerprints_of(metas: Sequence[StateInfo]) -> list[TextFingerprints]:
    """Compute the fingerprints of stored prompts."""
    return fingerprints_of_all([media_token_ids(meta.token_ids, meta.spans) for meta in metas])


class _SpaceIndex:
    """The index of one space, with the token ids compared last."""

    def __init__(self) -> None:
        self.index = CopiedIndex()
        self.generations: dict[str, int] = {}
        self.tokens: LRUCache[str, Ids] = LRUCache(
            TOKEN_CACHE_BYTES, getsizeof=lambda ids: max(1, ids.nbytes)
        )


class CopiedText:
    """Search for runs of a prompt in stored prompts of its partition and epoch.

    It takes about 1.5 bytes of memory a token, far less than the token's state takes in the store.
    The caller keeps a lock: it is not thread-safe.

    Parameters
    ----------
    store : Store
        Store from which the prompts' token ids are read.
    foreign_context : int or None
        The setting of this name: what stands behind more text of others is not searched.
    """

    def __init__(self, store: Store, foreign_context: int | None = None) -> None:
        self._store = store
        self._foreign_context = foreign_context
        self._spaces: dict[tuple[str, str], _SpaceIndex] = {}
        self._space_of: dict[str, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._space_of)

    def add(
        self, metas: Sequence[StateInfo], fingerprint_list: Sequence[TextFingerprints] | None = None
    ) -> int:
        """Index prompts, the oldest first.

        Parameters
        ----------
        metas : Sequence[StateInfo]
            Descriptions of the prompts.
        fingerprint_list : Sequence[TextFingerprints], optional
            Their `fingerprints_of`, if these were computed before.

        Returns
        -------
        int
            Number of prompts that are new and at least as long as a run.
        """
        spaces: dict[tuple[str, str], dict[str, TextFingerprints]] = {}
        for meta, prints in zip(
            metas,
            fingerprints_of(metas) if fingerprint_list is None else fingerprint_list,
            strict=True,
        ):
            spaces.setdefault((meta.partition, meta.epoch), {})[meta.id] = prints

        added: set[str] = set()
        for name, segments in spaces.items():
            space = self._spaces.get(name) or _SpaceIndex()
            new = space.index.add(segments)
            if new:
                self._spaces[name] = space
                self._space_of.update(dict.fromkeys(new, name))
                added.update(new)

        for meta in metas:
            if meta.generation and meta.id in added:
                self._spaces[meta.partition, meta.epoch].generations[meta.id] = meta.generation
        return len(added)

    def remove(self, id: str) -> bool:
        """Remove a prompt; False for an unknown one."""
        name = self._space_of.pop(id, None)
        if name is None:
            return False

        space = self._spaces[name]
        space.index.remove(id)
        space.generations.pop(id, None)
        space.tokens.pop(id, None)
        # Empty spaces of former epochs and partitions would pile up.
        if not len(space.index):
            del self._spaces[name]
        return True

    def search(self, prepared: Prepared, epoch: str) -> DonorCover:
        """Return the stored prompts of an epoch that cover a prompt, by their ids, and where."""
        target = media_token_ids(prepared.token_ids, prepared.spans)
        space = self._spaces.get((prepared.request.partition, epoch))
        if space is None:
            return DonorCover(len(target))

        foreign = ForeignContext(target, self._foreign_context)
        return cover(
            target,
            space.index,
            lambda id: self._searched(space, id, foreign),
            generation_of=lambda id: space.generations.get(id, 0),
        )

    def tokens(self, meta: StateInfo) -> Ids:
        """Return a stored prompt's token ids, as `media_token_ids` gives them."""
        space = self._spaces.get((meta.partition, meta.epoch))
        ids = (
            self._tokens(space, meta.id)
            if space is not None and meta.id in self._space_of
            else None
        )
        return media_token_ids(meta.token_ids, meta.spans) if ids is None else ids

    def _searched(self, space: _SpaceIndex, id: str, foreign: ForeignContext) -> Ids | None:
        """Return a segment's token ids, without those that stand behind too much other text."""
        # Rows of blends begin behind text that is not described.
        if self._foreign_context is not None and id in space.generations:
            return None
        ids = self._tokens(space, id)
        return None if ids is None else foreign.hide(ids)

    def _tokens(self, space: _SpaceIndex, id: str) -> Ids | None:
        """Return a segment's token ids from the memory of the last ones, or from the store.

        A common prefix is compared with the same holders again and again.
        """
        cached_ids = space.tokens.get(id)
        if cached_ids is not None:
            return cached_ids

        meta = self._store.meta(id)
        if meta is None:
            return None
        ids = media_token_ids(meta.token_ids, meta.spans)
        # A larger one would not fit, and the cache would raise.
        if ids.nbytes <= space.tokens.maxsize:
            space.tokens[id] = ids
        return ids
