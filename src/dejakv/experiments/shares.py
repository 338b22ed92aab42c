"""How much of a stream of prompts was asked before: in prefix blocks, which prefix caching serves, and anywhere.

No model is needed, only token ids. What stands anywhere but not in a prefix is what DejaKV can save beyond prefix caching.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dejakv.decide.copied.fingerprints import Hashes, run_hashes, with_media
from dejakv.identity import Span
from dejakv.request import DEFAULT_PARTITION

BLOCK = 16
"""Tokens in a prefix block: vLLM's default on a GPU."""

RUN = 32
"""Tokens in the shortest run that counts as found anywhere: shorter ones are mostly phrases of the language."""

MAX_SLOTS = 1 << 27
"""Slots of a partition's table, 1 GiB. It takes 80 million different runs; what comes after is looked up, but not remembered."""


@dataclass(frozen=True)
class Share:
    """Tokens of one prompt or of many, and how many of them were in earlier prompts of the same partition.

    prefix    in blocks of 16 from the beginning, as an unlimited prefix cache finds them
    anywhere  in runs of 32 or more that stand at any place in any earlier prompt; prefix blocks count too
    """

    tokens: int = 0
    prefix: int = 0
    anywhere: int = 0

    def __add__(self, other: "Share") -> "Share":
        return Share(self.tokens + other.tokens, self.prefix + other.prefix, self.anywhere + other.anywhere)

    @property
    def share_prefix(self) -> float:
        """Share of tokens in prefix blocks, [0, 1]."""
        return self.prefix / self.tokens if self.tokens else 0.0

    @property
    def share_anywhere(self) -> float:
        """Share of tokens found anywhere, [0, 1]."""
        return self.anywhere / self.tokens if self.tokens else 0.0


class Shares:
    """Measures prompts one after the other. `total` is the sum so far; `complete` is False once a table was full.

    About three milliseconds for a prompt of 2,000 tokens, and 14 to 27 bytes for each remembered token.
    """

    def __init__(self, max_slots: int = MAX_SLOTS) -> None:
        self.total = Share()
        self._max_slots = max_slots
        self._blocks: dict[str, set[int]] = {}
        self._runs: dict[str, _HashSet] = {}

    @property
    def complete(self) -> bool:
        return all(runs.complete for runs in self._runs.values())

    def add(self, ids: Sequence[int], partition: str = DEFAULT_PARTITION, spans: Sequence[Span] = ()) -> Share:
        """Counts one prompt against the earlier ones of its partition, and remembers it. As when a prompt is served, its last
        token never counts as found: it is computed for the answer. A picture's tokens are equal where the pictures are."""
        tokens = with_media(ids, spans)
        prefix = self._prefix(tokens, self._blocks.setdefault(partition, set()))
        runs = self._runs.setdefault(partition, _HashSet(self._max_slots))
        covered = _covered(tokens, runs)
        covered[:prefix] = True
        share = Share(len(tokens), prefix, int(np.count_nonzero(covered[:-1])))
        self.total += share
        return share

    @staticmethod
    def _prefix(tokens: NDArray[np.int64], seen: set[int]) -> int:
        found, chain, unbroken = 0, 0, True
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            chain = hash((chain, tokens[start : start + BLOCK].tobytes()))
            unbroken = unbroken and chain in seen
            found += BLOCK * unbroken
            seen.add(chain)
        return found - BLOCK if found and found == len(tokens) else found


def _covered(tokens: NDArray[np.int64], seen: "_HashSet") -> NDArray[np.bool_]:
    """Which tokens stand in runs that were seen. The prompt's own runs are remembered then."""
    if len(tokens) < RUN:
        return np.zeros(len(tokens), np.bool_)
    hashes = run_hashes(tokens, RUN)
    known = seen.contains(hashes)
    seen.add(hashes[~known])
    edges = np.zeros(len(tokens) + 1, np.int64)
    edges[: len(known)] += known
    edges[RUN:] -= known
    return np.cumsum(edges)[:-1] > 0


class _HashSet:
    """A set of 64-bit hashes in one table with linear probing: vectors in, vectors out."""

    def __init__(self, max_slots: int) -> None:
        self._table = np.zeros(min(1 << 12, max_slots), np.uint64)
        self._count = 0
        self._max_slots = max_slots
        self.complete = True

    def contains(self, hashes: Hashes) -> NDArray[np.bool_]:
        found = np.zeros(len(hashes), np.bool_)
        left, place = np.arange(len(hashes)), self._home(hashes)
        while left.size:
            held = self._table[place]
            found[left] = same = held == hashes[left]
            on = ~same & (held != 0)
            left, place = left[on], self._next(place[on])
        return found

    def add(self, hashes: Hashes) -> None:
        """Adds hashes that the set does not hold; one may be given twice."""
        while (self._count + len(hashes)) * 5 > len(self._table) * 3:
            if len(self._table) >= self._max_slots:
                self.complete = False
                return
            self._grow()
        self._count += self._put(hashes)

    def _put(self, hashes: Hashes) -> int:
        placed, place = 0, self._home(hashes)
        while hashes.size:
            free = self._table[place] == 0
            self._table[place[free]] = hashes[free]  # of several for one slot, one wins
            held = self._table[place]
            placed += len(np.unique(place[free]))
            on = held != hashes
            hashes, place = hashes[on], self._next(place[on])
        return placed

    def _grow(self) -> None:
        held = self._table[self._table != 0]
        self._table = np.zeros(2 * len(self._table), np.uint64)
        self._put(held)

    def _home(self, hashes: Hashes) -> NDArray[np.int64]:
        return (hashes & np.uint64(len(self._table) - 1)).astype(np.int64)

    def _next(self, place: NDArray[np.int64]) -> NDArray[np.int64]:
        return (place + 1) & (len(self._table) - 1)
