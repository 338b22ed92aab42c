"""Token maps: the donor token whose KV entries stand in for each token of a prompt, and what is read off a map."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import InputError

Ids = NDArray[np.int64]
Embed = Callable[[Any], NDArray[np.float32]]
"""Input embeddings `[k, hidden]` of `[k]` token ids. Negative ids (media, ends of donors) are never asked for."""


@dataclass(frozen=True)
class DonorTokens:
    """The token ids of one or more donors, one behind the other.

    starts  index in `ids` of each donor's first token
    first   position of each donor's first token in its own prompt

    >>> donors = DonorTokens.of([5, 6, 7], [8, 9])
    >>> donors.starts, donors.lengths, donors.positions.tolist()
    ((0, 3), [3, 2], [0, 1, 2, 0, 1])
    """

    ids: Ids
    starts: tuple[int, ...]
    first: tuple[int, ...]

    @classmethod
    def of(cls, *donors: Sequence[int] | Ids, first: Sequence[int] = ()) -> "DonorTokens":
        """Join donors; `first`: 0 for all if it is empty. Raises: InputError without donors or with an empty one."""
        if not donors or any(len(donor) == 0 for donor in donors):
            raise InputError("a token map needs donors of at least one token each")
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
        return tuple(start for start, first in zip(self.starts, self.first, strict=True) if not first)

    @property
    def stops(self) -> list[int]:
        """Position behind each donor's last token."""
        return [first + length for first, length in zip(self.first, self.lengths, strict=True)]

    @property
    def lengths(self) -> list[int]:
        return [int(x) for x in np.diff([*self.starts, len(self.ids)])]

    @property
    def number(self) -> Ids:
        """Number of the donor of each token."""
        return np.repeat(np.arange(len(self.starts)), self.lengths)

    def parts(self, source: Ids) -> Iterator[tuple[int, Ids, Ids]]:
        """Yield `(donor, target tokens, their indices in the donor)` for each donor that the map `source` uses.

        >>> [(n, rows.tolist(), at.tolist()) for n, rows, at in DonorTokens.of([5, 6], [7]).parts(np.array([2, 0, 1]))]
        [(0, [1, 2], [0, 1]), (1, [0], [0])]
        """
        number, places = self.number[source], self.rows[source]
        for index in np.unique(number).tolist():
            rows = np.flatnonzero(number == index)
            yield index, rows, places[rows]


@dataclass(frozen=True)
class TokenMap:
    """The donor token of each token of a prompt.

    source      `[n]` index into `DonorTokens.ids` for every target token
    similarity  `[n]` in [0, 1]: how well it fits; low values are recomputed first
    context     `[n]` tokens of common context around the match (left counted double), 0 where the map does not know
    """

    source: Ids
    similarity: NDArray[np.float32]
    context: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.source)


def stretches(marked: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return first and stop of each run of marked places.

    >>> stretches(np.array([True, True, False, True]))
    [(0, 2), (3, 4)]
    """
    edges = np.flatnonzero(np.diff(marked, prepend=False, append=False))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def equal_runs(target: Ids, donors: DonorTokens, source: Ids) -> tuple[Ids, Ids]:
    """Return, for each target token, first and stop of its copied run: tokens that equal consecutive tokens of one donor. A token that
    differs from its donor token is a run of its own.

    >>> first, stop = equal_runs(np.array([5, 6, 1, 7]), DonorTokens.of([5, 6, 9, 7]), np.array([0, 1, 2, 3]))
    >>> first.tolist(), stop.tolist()
    ([0, 0, 2, 3], [2, 2, 3, 4])
    """
    equal = donors.ids[source] == target
    follows = np.zeros(len(target), dtype=bool)
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


def with_prefix(donor_map: TokenMap, target: Ids, donors: DonorTokens, exact: Sequence[bool]) -> tuple[TokenMap, int]:
    """Return the map with the longest exact prefix taken from its donor, and the length of that prefix. At least the last token is
    left out, whose state gives the answer.

    exact  whether each donor's state is exact; donors not named are not

    >>> donors = DonorTokens.of([5, 6, 7, 8])
    >>> donor_map = TokenMap(np.zeros(3, np.int64), np.zeros(3, np.float32), np.zeros(3, np.int64))
    >>> with_prefix(donor_map, np.array([5, 6, 1]), donors, [True])[1]
    2
    """
    prefix_tokens, start = 0, 0
    for first, length, usable in zip(donors.starts, donors.lengths, exact, strict=False):
        shared = min(length, len(target) - 1) if usable else 0
        differs = donors.ids[first : first + shared] != target[:shared]
        same = int(differs.argmax()) if differs.any() else shared
        if same > prefix_tokens:
            prefix_tokens, start = same, first

    if not prefix_tokens:
        return donor_map, 0
    source, similarity, context = donor_map.source.copy(), donor_map.similarity.copy(), donor_map.context.copy()
    source[:prefix_tokens] = start + np.arange(prefix_tokens)
    similarity[:prefix_tokens] = 1.0
    context[:prefix_tokens] = np.maximum(context[:prefix_tokens], prefix_tokens)
    return replace(donor_map, source=source, similarity=similarity, context=context), prefix_tokens


def new_text(target: Ids, donors: DonorTokens, donor_map: TokenMap, min_length: int) -> NDArray[np.bool_]:
    """Mark tokens outside copied runs of at least `min_length` tokens, which the donors already serve. Media (negative ids) are never new.

    >>> donor_map = TokenMap(np.array([0, 1, 2]), np.ones(3, np.float32), np.zeros(3, np.int64))
    >>> new_text(np.array([5, 6, 1]), DonorTokens.of([5, 6, 7]), donor_map, min_length=2).tolist()
    [False, False, True]
    """
    first, stop = equal_runs(target, donors, donor_map.source)
    return (stop - first < min_length) & (target >= 0)


def long_runs(marked: NDArray[np.bool_], min_length: int) -> tuple[tuple[int, int], ...]:
    """Return first and stop of each run of at least `min_length` marked tokens.

    >>> long_runs(np.array([True, True, False, True]), min_length=2)
    ((0, 2),)
    """
    return tuple((first, stop) for first, stop in stretches(marked) if stop - first >= min_length)
