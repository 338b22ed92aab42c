"""Which donor token stands in for which target token. The map decides the quality of blending, more than the selector.

| name        | takes                                                                              |
| `context`   | the longest common context; where that is short, the nearest embedding near it     |
| `embedding` | the nearest embedding anywhere (SemShareKV, arXiv 2509.24832), exact cosine         |
| `lsh`       | the same by random hyperplanes                                                      |
| `align`     | a monotone alignment, as a diff tool makes it                                       |
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import ConfigError, InputError
from dejakv.reuse.quality import BlendMap

Ids = NDArray[np.int64]
Embed = Callable[[Any], NDArray[np.float32]]
"""Input embeddings `[k, hidden]` of `[k]` token ids. Negative ids (media, ends of donors) are never asked for."""

MAPS: tuple[BlendMap, ...] = get_args(BlendMap)


@dataclass(frozen=True)
class Donors:
    """One or more donors' token ids in a row.

    starts  where in `ids` each donor begins
    first   position of each donor's first token in the prompt that it was computed in; empty: 0 for all
    """

    ids: Ids
    starts: tuple[int, ...] = (0,)
    first: tuple[int, ...] = ()

    @classmethod
    def of(cls, *donors: Sequence[int] | Ids, first: Sequence[int] = ()) -> "Donors":
        """Raises InputError without donors or with an empty one."""
        if not donors or any(len(donor) == 0 for donor in donors):
            raise InputError("a token map needs donors of at least one token each")
        lengths = [len(donor) for donor in donors]
        starts = tuple(int(x) for x in np.cumsum([0, *lengths[:-1]]))
        return cls(np.concatenate([np.asarray(donor, dtype=np.int64) for donor in donors]), starts, tuple(first))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def rows(self) -> Ids:
        """Index of each token within its own donor."""
        return np.arange(len(self.ids)) - np.repeat(np.asarray(self.starts), self.lengths)

    @property
    def positions(self) -> Ids:
        """Position of each token in the prompt that it was computed in."""
        return self.rows + (np.repeat(np.asarray(self.first), self.lengths) if self.first else 0)

    @property
    def openings(self) -> tuple[int, ...]:
        """Where in `ids` a prompt begins: the starts of the donors that are no later part of one."""
        return (
            tuple(start for start, first in zip(self.starts, self.first, strict=True) if not first)
            if self.first
            else self.starts
        )

    @property
    def stops(self) -> list[int]:
        """Position behind each donor's last token."""
        return [
            first + length for first, length in zip(self.first or [0] * len(self.starts), self.lengths, strict=True)
        ]

    @property
    def lengths(self) -> list[int]:
        return [int(x) for x in np.diff([*self.starts, len(self.ids)])]

    @property
    def number(self) -> Ids:
        """Which donor each token belongs to."""
        return np.repeat(np.arange(len(self.starts)), self.lengths)

    def parts(self, source: Ids) -> Iterator[tuple[int, Ids, Ids]]:
        """Donor by donor what a map takes: the donor's number, which target tokens, and their places in the donor. Donors that
        nothing is taken from are left out."""
        number, places = self.number[source], self.rows[source]
        for index in np.unique(number).tolist():
            rows = np.flatnonzero(number == index)
            yield index, rows, places[rows]


@dataclass(frozen=True)
class TokenMap:
    """source      `[n]` index into `Donors.ids` for every target token
    similarity  `[n]` in [0, 1]: how well it fits; low values are recomputed first
    context     `[n]` tokens of common context around the match (left counted double), 0 where the map does not know
    """

    source: Ids
    similarity: NDArray[np.float32]
    context: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.source)


def stretches(marked: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First and stop of each run of marked places."""
    edges = np.flatnonzero(np.diff(marked, prepend=False, append=False))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def equal_runs(target: Ids, donors: Donors, source: Ids) -> tuple[Ids, Ids]:
    """For each token of the target, first and stop of the run of tokens around it that equal consecutive tokens of one donor. A
    token that differs from its own is alone."""
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
    starts_next = np.append(~follows[1:], True)
    stop = np.minimum.accumulate(np.where(starts_next, index, len(target))[::-1])[::-1] + 1
    return first, stop


def token_map(
    name: str,
    target: Sequence[int] | Ids,
    donors: Donors,
    embed: Embed,
    *,
    ends: Ids | None = None,
    bits: int = 256,
    rope_weight: float = 0.0,
    seed: int = 0,
) -> TokenMap:
    """The named map. `ends`: token ids that end a sentence; `bits`, `rope_weight`, `seed`: of the embedding maps.

    Raises: ConfigError for an unknown name, InputError for an empty target.
    """
    from dejakv.reuse.token_map_align import align_map
    from dejakv.reuse.token_map_context import context_map
    from dejakv.reuse.token_map_embedding import embedding_map, lsh_map

    ids = np.asarray(target, dtype=np.int64)
    if ids.size == 0:
        raise InputError("an empty prompt has no token map: give at least one token")
    if name == "context":
        return context_map(ids, donors, embed, ends=ends)
    if name == "align":
        return align_map(ids, donors)
    if name == "embedding":
        return embedding_map(ids, donors, embed, rope_weight=rope_weight)
    if name == "lsh":
        return lsh_map(ids, donors, embed, bits=bits, seed=seed, rope_weight=rope_weight)
    raise ConfigError(f"token map {name!r} is unknown: choose one of {', '.join(MAPS)}")
