"""Token ids as arrays that can be compared, and the fingerprints by which a text is found: winnowing (Schleimer, Wilkerson, Aiken, SIGMOD
2003).

Every run of `K` tokens has a hash; of each `WINDOW` neighbouring hashes the least is kept, of equal ones the rightmost. The choice depends
on the window alone, so a run of `K + WINDOW - 1` = 32 equal tokens has a fingerprint kept at the same place in both texts, whatever
surrounds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dejakv.identity import MediumSpan

Ids = NDArray[np.int64]
Hashes = NDArray[np.uint64]

K = 18
"""Tokens that a fingerprint is of."""

WINDOW = 15
"""Neighbouring hashes for each kept one: 2 / (WINDOW + 1) of all are kept, one in eight."""

GUARANTEED = K + WINDOW - 1
"""Tokens in the shortest run that always has a fingerprint."""

IN_A_ROW = 16
"""Most equal fingerprints kept in a row, half at the beginning, half at the end. Longer rows come of one token (or a few) repeated."""

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_LEFT = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def with_media(token_ids: Sequence[int] | Ids, spans: Sequence[MediumSpan]) -> Ids:
    """Token ids `[n]` in which a picture's placeholders have ids of their own (negative), from its digest and their order: so
    a placeholder fits only the same row of the same picture.

    >>> with_media([5, 0, 0, 6], [MediumSpan(1, 2, "0000000001" + "0" * 54)])
    array([     5, -65537, -65538,      6])
    """
    ids = np.array(token_ids, dtype=np.int64)
    for span in spans:
        base = int(span.digest[:10], 16)
        # Negative, and so apart from every id of a vocabulary.
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
    hashed_width, size = 0, 1
    while True:
        if width & size:
            # The binary digits of the width say which doubled runs it is made of.
            whole = doubled if whole is None else _joined(whole, doubled[hashed_width:])
            hashed_width += size

        if hashed_width == width:
            assert whole is not None
            return np.maximum(whole[:count], np.uint64(1))

        doubled = _joined(doubled, doubled[size:])
        size *= 2


def _joined(first_hashes: Hashes, second_hashes: Hashes) -> Hashes:
    both = min(len(first_hashes), len(second_hashes))
    return _mixed(first_hashes[:both] * _LEFT + second_hashes[:both])


def _mixed(values: Hashes) -> Hashes:
    """The finalizer of SplitMix64 (Steele, Lea, Flood, 2014)."""
    values = values + _LEFT
    values ^= values >> np.uint64(30)
    values *= _FIRST
    values ^= values >> np.uint64(27)
    values *= _SECOND
    values ^= values >> np.uint64(31)
    return values


@dataclass(frozen=True)
class TextFingerprints:
    """Winnowed fingerprints of a text.

    keys       `[m]` uint32: upper halves of the hashes
    positions  `[m]` int64, rising: where the `K` tokens of each begin
    """

    keys: NDArray[np.uint32]
    positions: Ids

    def __len__(self) -> int:
        return len(self.keys)


def fingerprints(tokens: Ids) -> TextFingerprints:
    """The fingerprints of a text `[n]`; none for fewer than `GUARANTEED` tokens. About 0.1 microseconds a token.

    >>> passage = np.arange(40)
    >>> one, moved = fingerprints(passage), fingerprints(np.concatenate([[7, 7, 7], passage]))
    >>> set(one.keys.tolist()) <= set(moved.keys.tolist())
    True
    """
    return fingerprints_of_all([tokens])[0]


def fingerprints_of_all(texts: Sequence[Ids]) -> list[TextFingerprints]:
    """The `fingerprints` of each text, several times as fast as one by one. Texts of 2^32 tokens together at most."""
    long = [number for number, text in enumerate(texts) if len(text) >= GUARANTEED]
    results = [TextFingerprints(np.empty(0, np.uint32), np.empty(0, np.int64))] * len(texts)
    if not long:
        return results
    # All texts as one array: numpy's overhead is paid once.
    lengths = np.array([len(texts[number]) for number in long])
    firsts = np.cumsum(lengths) - lengths
    hashes = run_hashes(np.concatenate([texts[number] for number in long]), K)
    positions = _winnowed(hashes, firsts, lengths)
    keys = (hashes[positions] >> _HALF).astype(np.uint32)

    text_of = np.searchsorted(firsts, positions, side="right") - 1
    selected = _not_deep_in_a_row(keys, text_of)
    keys, positions, text_of = keys[selected], positions[selected], text_of[selected]

    bounds = np.searchsorted(text_of, np.arange(len(long) + 1))
    for place, number in enumerate(long):
        text_slice = slice(bounds[place], bounds[place + 1])
        results[number] = TextFingerprints(keys[text_slice], positions[text_slice] - firsts[place])
    return results


def _winnowed(hashes: Hashes, firsts: Ids, lengths: Ids) -> Ids:
    """Positions of the rightmost least hash of each window within a text. The lower half of a hash orders it, the upper half is its key:
    the least of fifteen would be a poor key."""
    # Places count down in the lower half: of equal hashes the rightmost is the least.
    backwards = _LOW - np.arange(len(hashes), dtype=np.uint64)
    minima = (hashes << _HALF) | backwards
    # Minima over 2, 4, 8 and then all 15 neighbours: four passes instead of fourteen.
    for step in (1, 2, 4, WINDOW - 8):
        minima = np.minimum(minima[:-step], minima[step:])
    edges = np.zeros(len(minima) + 1, np.int8)  # windows that begin here lie within one text
    edges[firsts] += 1
    edges[firsts + lengths - GUARANTEED + 1] -= 1

    positions = (_LOW - (minima[np.cumsum(edges[:-1]) > 0] & _LOW)).astype(np.int64)
    return positions[np.flatnonzero(np.diff(positions, prepend=-1))]


def _not_deep_in_a_row(keys: NDArray[np.uint32], text_of: Ids) -> NDArray[np.bool_]:
    starts = np.flatnonzero(np.concatenate([[True], (keys[1:] != keys[:-1]) | (text_of[1:] != text_of[:-1])]))
    lengths = np.diff(starts, append=len(keys))
    if lengths.max() <= IN_A_ROW:
        return np.ones(len(keys), np.bool_)
    after = np.arange(len(keys)) - np.repeat(starts, lengths)
    before = np.repeat(lengths, lengths) - 1 - after
    return np.minimum(after, before) < IN_A_ROW // 2


def stretches(marked: NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """First place and length of each stretch of marked places."""
    edges = np.flatnonzero(np.diff(marked, prepend=False, append=False))
    return tuple(zip(edges[::2].tolist(), (edges[1::2] - edges[::2]).tolist(), strict=True))


RUN = 8
"""Tokens of the shortest run that a blend does not have to compute, to a few percent of the prompt (docs/explanation/blend.md)."""


def overlap(target: Ids, donors: Sequence[Ids], run: int = RUN) -> tuple[tuple[int, int], ...]:
    """First token and length of each stretch of a prompt `[n]` that is covered by runs of `run` tokens of its donors, by 64-bit hashes: an
    estimate of a blend's rows. Ids are as `with_media` gives them. About 1 ms for 700 tokens and 16 donors as long.

    >>> overlap(np.arange(20), [np.arange(5, 20)])
    ((5, 15),)
    """
    if not donors:
        return ()
    donor_hashes = np.concatenate([run_hashes(donor, run) for donor in donors])
    starts = np.flatnonzero(np.isin(run_hashes(target, run), donor_hashes))
    change = np.zeros(len(target) + 1, np.int64)
    # Each run adds one where it begins and takes it back where it ends: their sum is the cover.
    change[starts] += 1
    change[starts + run] -= 1
    return stretches(np.cumsum(change)[:-1] > 0)
