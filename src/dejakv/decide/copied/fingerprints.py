"""Token ids as comparable arrays, and the fingerprints by which a text is found.

The fingerprints are chosen by winnowing (Schleimer, Wilkerson, Aiken, SIGMOD 2003). Every run of
`K` tokens has a hash. Of each `WINDOW` neighbouring hashes the least is selected, of equal ones the
rightmost. The choice depends on the window alone, so a run of `K + WINDOW - 1` = 32 equal tokens
has a fingerprint selected at the same place in both texts, whatever surrounds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dejakv.identity import MediumSpan, token_bytes

Ids = NDArray[np.int64]
Hashes = NDArray[np.uint64]

K = 18
"""Tokens in the run that a fingerprint stands for."""

WINDOW = 15
"""Neighbouring hashes for each selected one.

2 / (WINDOW + 1) of all are selected, one in eight.
"""

SHORTEST_FINDABLE_RUN = K + WINDOW - 1
"""Tokens in the shortest run that always has a fingerprint."""

IN_A_ROW = 16
"""Maximum equal fingerprints in a row, half from its beginning and half from its end.

Longer rows come of one token, or a few, repeated.
"""

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def media_token_ids(token_ids: Sequence[int] | Ids, spans: Sequence[MediumSpan]) -> Ids:
    """Return token ids `[n]` in which the rows of media have negative ids.

    The negative ids follow from the medium's digest and the row's place in it, so a placeholder
    equals only the same row of the same medium.

    Examples
    --------
    >>> media_token_ids([5, 0, 0, 6], [MediumSpan(1, 2, "0000000001" + "0" * 54)])
    array([     5, -65537, -65538,      6])
    """
    if isinstance(token_ids, np.ndarray):
        ids = token_ids.astype(np.int64)
    else:
        ids = np.frombuffer(token_bytes(token_ids), np.uint32).astype(np.int64)
    for span in spans:
        base = int(span.digest[:10], 16)
        # Negative, and so apart from every id of a vocabulary.
        ids[span.start : span.start + span.length] = -(
            base * (1 << 16) + np.arange(span.length) + 1
        )
    return ids


def run_hashes(tokens: NDArray[np.int64], width: int) -> Hashes:
    """Hash every run of `width` tokens.

    Hashes of runs of 1, 2, 4, ... tokens are combined, each from two of half the width, and those
    that make up `width` are joined.

    Returns
    -------
    Hashes, shape [n - width + 1]
        64-bit hashes, never 0. Empty for fewer tokens than `width`.
    """
    count = len(tokens) - width + 1
    if count < 1:
        return np.empty(0, np.uint64)

    doubled = _mix(tokens.astype(np.uint64))
    whole: Hashes | None = None
    hashed_width, size = 0, 1
    while True:
        if width & size:
            # The binary digits of the width say which doubled runs it is made of.
            whole = doubled if whole is None else _combine(whole, doubled[hashed_width:])
            hashed_width += size

        if hashed_width == width:
            assert whole is not None
            return np.maximum(whole[:count], np.uint64(1))

        doubled = _combine(doubled, doubled[size:])
        size *= 2


def _combine(first_hashes: Hashes, second_hashes: Hashes) -> Hashes:
    both = min(len(first_hashes), len(second_hashes))
    return _mix(first_hashes[:both] * _GOLDEN_RATIO + second_hashes[:both])


def _mix(values: Hashes) -> Hashes:
    """Mix by the finalizer of SplitMix64 (Steele, Lea, Flood, 2014)."""
    values = values + _GOLDEN_RATIO
    values ^= values >> np.uint64(30)
    values *= _FIRST
    values ^= values >> np.uint64(27)
    values *= _SECOND
    values ^= values >> np.uint64(31)
    return values


@dataclass(frozen=True)
class TextFingerprints:
    """Winnowed fingerprints of a text.

    Attributes
    ----------
    keys : uint32 array, shape [m]
        Upper halves of the hashes.
    positions : int64 array, shape [m]
        Where the `K` tokens of each begin, ascending.
    """

    keys: NDArray[np.uint32]
    positions: Ids

    def __len__(self) -> int:
        return len(self.keys)


def fingerprints(tokens: Ids) -> TextFingerprints:
    """Compute the fingerprints of a text `[n]`, in about 0.1 microseconds a token.

    A text of fewer than `SHORTEST_FINDABLE_RUN` tokens has none.

    Examples
    --------
    >>> passage = np.arange(40)
    >>> one, moved = fingerprints(passage), fingerprints(np.concatenate([[7, 7, 7], passage]))
    >>> set(one.keys.tolist()) <= set(moved.keys.tolist())
    True
    """
    return fingerprints_of_all([tokens])[0]


def fingerprints_of_all(texts: Sequence[Ids]) -> list[TextFingerprints]:
    """Compute the `fingerprints` of each text, several times as fast as one by one.

    The texts may have at most 2^32 tokens together.
    """
    long = [number for number, text in enumerate(texts) if len(text) >= SHORTEST_FINDABLE_RUN]
    results = [TextFingerprints(np.empty(0, np.uint32), np.empty(0, np.int64))] * len(texts)
    if not long:
        return results
    # All texts as one array: numpy's overhead is paid once.
    lengths = np.array([len(texts[number]) for number in long])
    firsts = np.cumsum(lengths) - lengths
    hashes = run_hashes(np.concatenate([texts[number] for number in long]), K)
    positions = _winnow(hashes, firsts, lengths)
    keys = (hashes[positions] >> _HALF).astype(np.uint32)

    text_of = np.searchsorted(firsts, positions, side="right") - 1
    selected = _not_deep_in_a_row(keys, text_of)
    keys, positions, text_of = keys[selected], positions[selected], text_of[selected]

    bounds = np.searchsorted(text_of, np.arange(len(long) + 1))
    for place, number in enumerate(long):
        text_slice = slice(bounds[place], bounds[place + 1])
        results[number] = TextFingerprints(keys[text_slice], positions[text_slice] - firsts[place])
    return results


def _winnow(hashes: Hashes, firsts: Ids, lengths: Ids) -> Ids:
    """Return the positions of the rightmost least hash of each window within a text.

    The lower half of a hash orders it and the upper half is its key, since the least of fifteen
    would be a poor key.
    """
    # Places count down in the lower half: of equal hashes the rightmost is the least.
    backwards = _LOW - np.arange(len(hashes), dtype=np.uint64)
    minima = (hashes << _HALF) | backwards
    # Minima over 2, 4, 8 and then all 15 neighbours: four passes instead of fourteen.
    for step in (1, 2, 4, WINDOW - 8):
        minima = np.minimum(minima[:-step], minima[step:])

    # A window must lie within one text: counted up where these begin and down where they end.
    edges = np.zeros(len(minima) + 1, np.int8)
    edges[firsts] += 1
    edges[firsts + lengths - SHORTEST_FINDABLE_RUN + 1] -= 1

    positions = (_LOW - (minima[np.cumsum(edges[:-1]) > 0] & _LOW)).astype(np.int64)
    return positions[np.flatnonzero(np.diff(positions, prepend=-1))]


def _not_deep_in_a_row(keys: NDArray[np.uint32], text_of: Ids) -> NDArray[np.bool_]:
    starts = np.flatnonzero(
        np.concatenate([[True], (keys[1:] != keys[:-1]) | (text_of[1:] != text_of[:-1])])
    )

    lengths = np.diff(starts, append=len(keys))
    if lengths.max() <= IN_A_ROW:
        return np.ones(len(keys), np.bool_)
    # How many of the row stand before and behind each place: only those near an end stay.
    after = np.arange(len(keys)) - np.repeat(starts, lengths)
    before = np.repeat(lengths, lengths) - 1 - after
    return np.minimum(after, before) < IN_A_ROW // 2


def stretches(marked: NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Return first place and length of each stretch of marked places."""
    edges = np.flatnonzero(np.diff(marked, prepend=False, append=False))
    return tuple(zip(edges[::2].tolist(), (edges[1::2] - edges[::2]).tolist(), strict=True))


SHORTEST_COPIED_RUN = 8
"""Tokens of the shortest run that a blend does not have to compute.

This is true to a few percent of the prompt (docs/explanation/blend.md).
"""


def overlap(
    target: Ids, donors: Sequence[Ids], run: int = SHORTEST_COPIED_RUN
) -> tuple[tuple[int, int], ...]:
    """Return the stretches of a prompt that runs of its donors cover, to estimate a blend's rows.

    Runs are compared by 64-bit hashes, in about 1 ms for 700 tokens and 16 donors as long.

    Parameters
    ----------
    target : Ids, shape [n]
        Ids of the prompt as `media_token_ids` returns them.
    donors : Sequence[Ids]
        Ids of the donors, likewise.
    run : int
        Tokens of the shortest run that counts.

    Returns
    -------
    tuple[tuple[int, int], ...]
        First token and length of each stretch.

    Examples
    --------
    >>> overlap(np.arange(20), [np.arange(5, 20)])
    ((5, 15),)
    """
    if not donors:
        return ()
    # The 0 is no hash, and keeps the search within bounds.
    donor_hashes = np.concatenate([[np.uint64(0)], *(run_hashes(donor, run) for donor in donors)])
    donor_hashes.sort()
    hashes = run_hashes(target, run)
    # One search in sorted hashes; `np.isin` makes a table of them, ten times as slowly.
    places = np.searchsorted(donor_hashes, hashes, side="right") - 1
    starts = np.flatnonzero(donor_hashes[places] == hashes)

    change = np.zeros(len(target) + 1, np.int64)
    # Each run adds one where it begins and takes it back where it ends: their sum is the cover.
    change[starts] += 1
    change[starts + run] -= 1
    return stretches(np.cumsum(change)[:-1] > 0)
