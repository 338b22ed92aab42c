"""Interface of levels: ways to find an earlier request with reusable state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import former_names
from dejakv.request import Request

Status = Literal["hit", "miss", "skip"]
Vectors = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Match:
    """A donor and how it was found.

    Attributes
    ----------
    donor : str
        Id of the donor's state.
    level : str
        Name in the status table: `exact_text`, `semantic_text`, `embedding:<layer>` or `copied`;
        `named` for a donor that the caller named.
    score : float
        Cosine similarity in [-1, 1]; for copied text the covered share of the prompt; 1.0 for exact
        text and a named donor.
    layers : Mapping[str, float]
        Scores by latent layer.
    """

    donor: str
    level: str
    score: float
    layers: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def chunk_id(self) -> str:
        """Id of the donor in a store, by the prototypes' name."""
        return self.donor

    @property
    def layer(self) -> str:
        """Name of the deciding latent layer, empty for levels without layers."""
        return self.level.partition("embedding:")[2]


@dataclass(frozen=True)
class Query:
    """Input of the levels.

    Attributes
    ----------
    request : Request
        The request.
    space : str
        Name that separates requests that must never match: by partition, epoch and, by default,
        media. A level shares nothing across spaces.
    embed : Callable[[], Vectors]
        Function that computes the latent layers' vectors, called at most once and on demand
        (`vectors`).
    encoded : dict[str, float32 array or None]
        Vectors of the text, stored here by levels in `encode`.
    """

    request: Request
    space: str
    embed: Callable[[], Vectors] = dict
    encoded: dict[str, NDArray[np.float32] | None] = field(
        default_factory=dict[str, NDArray[np.float32] | None]
    )

    @property
    def text(self) -> str:
        """Text that levels compare."""
        return self.request.chunk

    @cached_property
    def vectors(self) -> Vectors:
        """Vectors by latent layer, 1-D float32; failed layers are absent."""
        return self.embed()


@dataclass(frozen=True)
class LevelSearch:
    """Candidates of a level, best first, and its rows of the status table.

    Attributes
    ----------
    matches : tuple[Match, ...]
        Candidates, best first.
    statuses : Mapping[str, Status]
        `hit`, `miss` or `skip` by name in the status table.
    """

    matches: tuple[Match, ...]
    statuses: Mapping[str, Status]


class Level(Protocol):
    """Base of levels.

    The finder calls `search`, `add` and `remove` under its lock, so a level needs none. Three
    members are optional:

    - `encode(query)`, called before from several threads, computes the vectors that search and
    addition need, once: `query.vectors`, or `query.encoded["text"]`, which is stored with the
    chunk.
    - `thresholds` has the least score by `Match.level`, for the threshold guard.
    - `fingerprint` is that of the encoder. Vectors of another one are ignored.
    """

    name: str

    @property
    def status_names(self) -> tuple[str, ...]:
        """Rows in the status table: `(name,)` for most levels."""
        ...

    def search(self, query: Query) -> LevelSearch:
        """Search for donors. Lack of data is a miss or a skip, never an error."""
        ...

    def add(self, donor: str, query: Query) -> None:
        """Add a donor with its query; adding a donor again is allowed."""
        ...

    def remove(self, donor: str) -> None:
        """Remove a donor; an unknown one is ignored."""
        ...

    def __len__(self) -> int: ...


__getattr__ = former_names(__name__, Search="LevelSearch")
