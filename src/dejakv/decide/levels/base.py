"""Interface of levels: ways to find an earlier request with reusable state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dejakv.request import Request

Status = Literal["hit", "miss", "skip"]
Vectors = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Match:
    """A donor and how it was found.

    level  name in the status table: `exact_text`, `semantic_text`, `embedding:<layer>`
    score  cosine similarity in [-1, 1]; 1.0 for exact text
    """

    donor: str
    level: str
    score: float
    layers: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def chunk_id(self) -> str:
        """Id of the donor's chunk, in a store."""
        return self.donor

    @property
    def layer(self) -> str:
        """The deciding latent layer, empty for levels without layers."""
        return self.level.partition("embedding:")[2]


@dataclass(frozen=True)
class Query:
    """Input of the levels. `space` separates requests that must never match: by partition, epoch and, by default, media. A level keeps
    nothing across spaces.

    embed    computes the latent layers' vectors, at most once and on demand (`query.vectors`)
    encoded  vectors of the text, left here by levels (`encode`)
    """

    request: Request
    space: str
    embed: Callable[[], Vectors] = dict
    encoded: dict[str, NDArray[np.float32] | None] = field(default_factory=dict[str, NDArray[np.float32] | None])

    @property
    def text(self) -> str:
        return self.request.chunk

    @cached_property
    def vectors(self) -> Vectors:
        """Vectors by latent layer, 1-D float32; failed layers are absent."""
        return self.embed()


@dataclass(frozen=True)
class Search:
    """Candidates of a level, best first (empty: none), and its rows of the status table."""

    matches: tuple[Match, ...]
    statuses: Mapping[str, Status]


class Level(Protocol):
    """Base of levels. `add` and `remove` are idempotent; `search` never raises for lack of data: it returns a miss or a skip.

    The finder calls all three under its lock, so a level needs none. Optional: `encode(query)`, called before from several threads,
    computes the vectors that both need, once: `query.vectors`, or `query.encoded["text"]`, stored with the chunk; `thresholds`, the least
    score by `Match.level`, for the threshold guard; `fingerprint` of the encoder: vectors of another one are ignored.
    """

    name: str

    @property
    def status_names(self) -> tuple[str, ...]:
        """Rows in the status table: `(name,)` for most levels."""
        ...

    def search(self, query: Query) -> Search: ...

    def add(self, donor: str, query: Query) -> None: ...

    def remove(self, donor: str) -> None: ...

    def __len__(self) -> int: ...
