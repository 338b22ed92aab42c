"""Which places of a text are indexed: winnowing (Schleimer, Wilkerson, Aiken, SIGMOD 2003).

Every run of `K` tokens has a hash; of each `WINDOW` neighbouring hashes the least is kept, of equal ones the rightmost. What is
kept depends on the window alone, so a run of `K + WINDOW - 1` = 32 equal tokens has a fingerprint kept at the same place in
both texts, whatever surrounds it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dejakv.decide.copied.tokens import Hashes, Ids, run_hashes

K = 18
"""Tokens that a fingerprint is of."""

WINDOW = 15
"""Neighbouring hashes of which one is kept: 2 / (WINDOW + 1) of all, one in eight."""

GUARANTEED = K + WINDOW - 1
"""Tokens in the shortest run that always has a fingerprint."""

IN_A_ROW = 16
"""Equal fingerprints in a row that are kept: half at the beginning, half at the end. More come of one token (or a few) repeated."""

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@dataclass(frozen=True)
class Fingerprints:
    """keys       `[m]` uint32
    positions  `[m]` int64, rising: where the `K` tokens of each begin
    """

    keys: NDArray[np.uint32]
    positions: Ids

    def __len__(self) -> int:
        return len(self.keys)


def fingerprints(tokens: Ids) -> Fingerprints:
    """The fingerprints of a text `[n]`; none for fewer than `GUARANTEED` tokens. About 0.1 microseconds a token.

    >>> passage = np.arange(40)
    >>> one, moved = fingerprints(passage), fingerprints(np.concatenate([[7, 7, 7], passage]))
    >>> set(one.keys.tolist()) <= set(moved.keys.tolist())
    True
    """
    if len(tokens) < GUARANTEED:
        return Fingerprints(np.empty(0, np.uint32), np.empty(0, np.int64))
    hashes = run_hashes(tokens, K)
    positions = _winnowed(hashes)
    keys = (hashes[positions] >> _HALF).astype(np.uint32)
    kept = _not_deep_in_a_row(keys)
    return Fingerprints(keys[kept], positions[kept])


def _winnowed(hashes: Hashes) -> Ids:
    """Positions of the rightmost least hash of each window. The lower half of a hash orders it, the upper half is its key: the
    least of fifteen would be a poor key."""
    backwards = _LOW - np.arange(len(hashes), dtype=np.uint64)
    least = (hashes << _HALF) | backwards
    for step in (1, 2, 4, WINDOW - 8):
        least = np.minimum(least[:-step], least[step:])
    positions = (_LOW - (least & _LOW)).astype(np.int64)
    return positions[np.flatnonzero(np.diff(positions, prepend=-1))]


def _not_deep_in_a_row(keys: NDArray[np.uint32]) -> NDArray[np.bool_]:
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    lengths = np.diff(starts, append=len(keys))
    if lengths.max() <= IN_A_ROW:
        return np.ones(len(keys), np.bool_)
    after = np.arange(len(keys)) - np.repeat(starts, lengths)
    before = np.repeat(lengths, lengths) - 1 - after
    return np.minimum(after, before) < IN_A_ROW // 2
