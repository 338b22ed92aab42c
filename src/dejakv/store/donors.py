"""Donors: states by their descriptions, of which the rows that are needed are read, and no others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dejakv.store.base import Chunk, ChunkMeta, Rows
from dejakv.store.store import Store


class Donor(Protocol):
    """A state by its description, from which the rows that are needed can be read: a chunk, or one in a store."""

    @property
    def meta(self) -> ChunkMeta: ...

    def read(self, rows: Rows) -> Sequence[Chunk] | None:
        """Chunks that hold at least these rows, each those from its `first` on; None if they cannot be read."""
        ...

    def whole(self) -> Chunk | None:
        """All rows in one chunk."""
        ...


@dataclass(frozen=True)
class StoredDonor:
    """See `Donor`. It is read when its rows are asked for."""

    store: Store
    meta: ChunkMeta

    def read(self, rows: Rows) -> Sequence[Chunk] | None:
        return self.store.get_parts(self.meta.id, rows)

    def whole(self) -> Chunk | None:
        return self.store.get(self.meta.id)
