"""Token ids as arrays that can be compared, and hashes of their runs."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dejakv.identity import Span

Ids = NDArray[np.int64]
Hashes = NDArray[np.uint64]


def with_media(token_ids: Sequence[int] | Ids, spans: Sequence[Span]) -> Ids:
    """Token ids `[n]` in which a picture's placeholders have ids of their own (negative), from its digest and their order: so
    a placeholder fits only the same row of the same picture.

    >>> with_media([5, 0, 0, 6], [Span(1, 2, "0000000001" + "0" * 54)])
    array([     5, -65537, -65538,      6])
    """
    ids = np.array(token_ids, dtype=np.int64)
    for span in spans:
        base = int(span.digest[:10], 16)
        ids[span.start : span.start + span.length] = -(base * (1 << 16) + np.arange(span.length) + 1)
    return ids


def run_hashes(tokens: NDArray[np.int64], width: int) -> Hashes:
    """A 64-bit hash of every run of `width` tokens, `[n - width + 1]`, never 0; empty for fewer tokens.

    Hashes of runs of 1, 2, 4, ... tokens are combined, each from two of half the width, and those that make up `width` joined.
    """
    count = len(tokens) - width + 1
    if count < 1:
        return np.empty(0, np.uint64)
    doubled = _mixed(tokens.astype(np.uint64))
    whole: Hashes | None = None
    held, size = 0, 1
    while True:
        if width & size:
            whole = doubled if whole is None else _joined(whole, doubled[held:])
            held += size
        if held == width:
            assert whole is not None
            return np.maximum(whole[:count], np.uint64(1))
        doubled = _joined(doubled, doubled[size:])
        size *= 2


_LEFT = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _joined(left: Hashes, right: Hashes) -> Hashes:
    both = min(len(left), len(right))
    return _mixed(left[:both] * _LEFT + right[:both])


def _mixed(values: Hashes) -> Hashes:
    """The finalizer of SplitMix64 (Steele, Lea, Flood, 2014)."""
    values = values + _LEFT
    values ^= values >> np.uint64(30)
    values *= _FIRST
    values ^= values >> np.uint64(27)
    values *= _SECOND
    values ^= values >> np.uint64(31)
    return values
