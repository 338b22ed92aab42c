"""The seam of a level: one way to find an earlier request whose state may stand in for this one's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dejakv.request import Request

Status = Literal["hit", "miss", "skip"]
Vectors = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Match:
    """A donor and how it was found.

    level  what the status table calls it: `exact_text`, `semantic_text`, `embedding:<layer>`
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
        """The latent layer that decided, empty for levels without layers."""
        return self.level.partition("embedding:")[2]

    @property
    def provenance(self) -> str:
        """As logs and reports print it: `text:exact`, `text:semantic`, `embedding:prompt`."""
        names = {"exact_text": "text:exact", "semantic_text": "text:semantic"}
        return names.get(self.level, self.level)


@dataclass(frozen=True)
class Query:
    """What the levels compare. `space` separates what must never match: partition and epoch, and, unless the caller
    allowed otherwise, the media. A level keeps nothing across spaces.

    embed    computes the latent layers' vectors, at most once and only if a level asks (`query.vectors`)
    encoded  vectors of the text, as levels have left them here (`Encodes`)
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
        """Latent layer name -> 1-D float32 vector; a layer that could not be computed is absent."""
        return self.embed()


@dataclass(frozen=True)
class Search:
    """What a level found: candidates, best first (empty: none), and its rows of the status table."""

    matches: tuple[Match, ...]
    statuses: Mapping[str, Status]


class Level(Protocol):
    """`add` and `remove` are idempotent; `search` never raises for lack of data: that is a miss or a skip. The finder calls all
    three under its lock, so a level needs none, and what takes long belongs into `Encodes`.

    A level may have two more attributes: `thresholds`, the least score by the level that a match names, for the threshold guard, and
    `fingerprint`, of the encoder that its vectors depend on: vectors of another fingerprint are of no use.
    """

    name: str

    @property
    def status_names(self) -> tuple[str, ...]:
        """Its rows in the status table: `(name,)` for most."""
        ...

    def search(self, query: Query) -> Search: ...

    def add(self, donor: str, query: Query) -> None: ...

    def remove(self, donor: str) -> None: ...

    def __len__(self) -> int: ...


@runtime_checkable
class Encodes(Protocol):
    """A level that compares vectors."""

    def encode(self, query: Query) -> None:
        """Computes the vectors that `search` and `add` need of a query, once: `query.vectors`, or `query.encoded["text"]`, which is
        stored with the chunk. The finder calls it before it takes its lock, from several threads."""
        ...
