"""Token maps: the donor token whose KV entries stand in for each token of a prompt.

What is read off a map is here too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import InputError

Ids = NDArray[np.int64]
Embed = Callable[[Any], NDArray[np.float32]]
"""Function that returns input embeddings `[k, hidden]` of `[k]` token ids.

Negative ids (media, ends of donors) are never asked for.
"""


def sorted_unique(numbers: Ids) -> Ids:
    """Return the different numbers in order; numpy's own hashes them, ten times as slowly.

    Examples
    --------
    >>> sorted_unique(np.array([3, 1, 3])).tolist()
    [1, 3]
    """
    ranked = np.sort(numbers)
    return ranked[np.diff(ranked, prepend=ranked[:1] - 1) != 0]


@dataclass(frozen=True)
class DonorTokens:
    """Token ids of one or more donors, one behind the other.

    Attributes
    ----------
    ids : Ids
        The token ids.
    starts : tuple[int, ...]
        Index in `ids` of each donor's first token.
    first : tuple[int, ...]
        Position of each donor's first token in its own prompt.

    Examples
    --------
    >>> donors = DonorTokens.of([5, 6, 7], [8, 9])
    >>> donors.starts, donors.lengths, donors.positions.tolist()
    ((0, 3), [3, 2], [0, 1, 2, 0, 1])
    """

    ids: Ids
    starts: tuple[int, ...]
    first: tuple[int, ...]

    @classmethod
    def of(cls, *donors: Sequence[int] | Ids, first: Sequence[int] = ()) -> "DonorTokens":
        """Join donors.

        Parameters
        ----------
        first : Sequence[int]
            Position of each donor's first token in its own prompt. Empty for 0 each.

        Raises
        ------
        InputError
            Without donors, or with an empty one.
        """
        if not donors or any(len(donor) == 0 for donor in donors):
            raise InputError("a token map needs donors of at least one token each")
        # Joined once: maps index all donors as one array.
        lengths = [len(donor) for donor in donors]
        starts = tuple(int(x) for x in np.cumsum([0, *lengths[:-1]]))
        ids = np.concatenate([np.asarray(donor, dtype=np.int64) for donor in donors])
        return cls(ids, starts, tuple(first) or (0,) * len(donors))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def rows(self) -> Ids:
        """Index of each token within its own donor."""
        return np.arange(len(self.ids)) - np.repeat(np.asarray(self.starts), self.lengths)

    @property
    def positions(self) -> Ids:
        """Position of each token in the prompt that it was computed in."""
        return self.rows + np.repeat(np.asarray(self.first), self.lengths)

    @property
    def openings(self) -> tuple[int, ...]:
        """Starts of the donors that hold their prompt from its first token on."""
        return tuple(
            start for start, first in zip(self.starts, self.first, strict=True) if not first
        )

    @property
    def stops(self) -> list[int]:
        """Position behind each donor's last token."""
        return [first + length for first, length in zip(self.first, self.lengths, strict=True)]

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each donor."""
        return [int(x) for x in np.diff([*self.starts, len(self.ids)])]

    @property
    def number(self) -> Ids:
        """Number of the donor of each token."""
        return np.repeat(np.arange(len(self.starts)), self.lengths)

    def parts(self, source: Ids) -> Iterator[tuple[int, Ids, Ids]]:
        """Yield donor, target tokens and their indices in it for each donor that a map uses.

        Examples
        --------
        >>> donors = DonorTokens.of([5, 6], [7])
        >>> [(n, rows.tolist(), at.tolist()) for n, rows, at in donors.parts(np.array([2, 0, 1]))]
        [(0, [1, 2], [0, 1]), (1, [0], [0])]
        """
        number, places = self.number[source], self.rows[source]
        for index in sorted_unique(number).tolist():
            rows = np.flatnonzero(number == index)
            yield index, rows, places[rows]


@dataclass(frozen=True)
class TokenMap:
    """The donor token of each token of a prompt.

    Attributes
    ----------
    source : Ids, shape [n]
        Index into `DonorTokens.ids` for every target token.
    similarity : float32 array, shape [n]
        How well the donor token fits, in [0, 1]. Tokens of low similarity are recomputed first.
    context : int64 array, shape [n]
        Tokens of common context around the match (left counted double), 0 where the map does not
        know.
    """

    source: Ids
    similarity: NDArray[np.float32]
    context: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.source)


def stretches(marked: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return first and stop of each run of marked places.

    Examples
    --------
    >>> stretches(np.array([True, True, False, True]))
    [(0, 2), (3, 4)]
    """
    edges = np.flatnonzero(np.diff(marked, prepend=False, append=False))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def equal_runs(target: Ids, donors: DonorTokens, source: Ids) -> tuple[Ids, Ids]:
    """Return first and stop of the copied run that each target token is part of.

    The tokens of a copied run equal consecutive tokens of one donor. A token that differs from its
    donor token is a run of its own.

    Examples
    --------
    >>> donors = DonorTokens.of([5, 6, 9, 7])
    >>> first, stop = equal_runs(np.array([5, 6, 1, 7]), donors, np.array([0, 1, 2, 3]))
    >>> first.tolist(), stop.tolist()
    ([0, 0, 2, 3], [2, 2, 3, 4])
    """
    equal = donors.ids[source] == target
    follows = np.zeros(len(target), dtype=bool)
    # A token goes on with its neighbour's run if both are equal and stand side by side in a donor.
    follows[1:] = (
        equal[1:]
        & equal[:-1]
        & (source[1:] == source[:-1] + 1)
        & (donors.number[source[1:]] == donors.number[source[:-1]])
    )

    index = np.arange(len(target))
    first = np.maximum.accumulate(np.where(follows, 0, index))
    # The same from the right: a run stops where the next one starts.
    starts_next = np.append(~follows[1:], True)
    stop = np.minimum.accumulate(np.where(starts_next, index, len(target))[::-1])[::-1] + 1
    return first, stop


def with_prefix(
    donor_map: TokenMap, target: Ids, donors: DonorTokens, exact: Sequence[bool]
) -> tuple[TokenMap, int]:
    """Take the longest exact prefix from its donor.

    At least the last token is left out, whose state gives the answer.

    Parameters
    ----------
    exact : Sequence[bool]
        Whether each donor's state is exact; donors beyond the sequence are not.

    Returns
    -------
    TokenMap
        The map with the prefix.
    int
        Tokens of the prefix.

    Examples
    --------
    >>> donors = DonorTokens.of([5, 6, 7, 8])
    >>> donor_map = TokenMap(np.zeros(3, np.int64), np.zeros(3, np.float32), np.zeros(3, np.int64))
    >>> with_prefix(donor_map, np.array([5, 6, 1]), donors, [True])[1]
    2
    """
    prefix_tokens, start = 0, 0
    for first, length, usable in zip(donors.starts, donors.lengths, exact, strict=False):
        # The last token is always computed, since its logits give the answer.
        shared = min(length, len(target) - 1) if usable else 0
        differs = donors.ids[first : first + shared] != target[:shared]

        same = int(differs.argmax()) if differs.any() else shared
        if same > prefix_tokens:
            prefix_tokens, start = same, first

    if not prefix_tokens:
        return donor_map, 0
    source, similarity, context = (
        donor_map.source.copy(),
        donor_map.similarity.copy(),
        donor_map.context.copy(),
    )

    source[:prefix_tokens] = start + np.arange(prefix_tokens)
    similarity[:prefix_tokens] = 1.0
    context[:prefix_tokens] = np.maximum(context[:prefix_tokens], prefix_tokens)
    return replace(donor_map, source=source, similarity=similarity, context=context), prefix_tokens


def mark_new_text(
    target: Ids, donors: DonorTokens, donor_map: TokenMap, min_length: int
) -> NDArray[np.bool_]:
    """Mark tokens outside copied runs of at least `min_length` tokens.

    The donors serve such runs already. Media (negative ids) are never new.

    Examples
    --------
    >>> donors, target = DonorTokens.of([5, 6, 7]), np.array([5, 6, 1])
    >>> donor_map = TokenMap(np.array([0, 1, 2]), np.ones(3, np.float32), np.zeros(3, np.int64))
    >>> mark_new_text(target, donors, donor_map, min_length=2).tolist()
    [False, False, True]
    """
    first, stop = equal_runs(target, donors, donor_map.source)
    return (stop - first < min_length) & (target >= 0)


def long_runs(marked: NDArray[np.bool_], min_length: int) -> tuple[tuple[int, int], ...]:
    """Return first and stop of each run of at least `min_length` marked tokens.

    Examples
    --------
    >>> long_runs(np.array([True, True, False, True]), min_length=2)
    ((0, 2),)
    """
    return tuple((first, stop) for first, stop in stretches(marked) if stop - first >= min_length)
