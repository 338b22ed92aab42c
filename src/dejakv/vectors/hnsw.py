"""Approximate search for large spaces, over a graph (HNSW) by usearch.

The graph is that of Malkov and Yashunin, arXiv 1603.09320.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dejakv.errors import MissingExtraError
from dejakv.vectors.base import ANY, Hit, Vector, unit_vector
from dejakv.vectors.flat import FlatIndex

FLAT_BELOW = 2048
"""Entries below which every vector is compared: faster than a graph, and exact."""


class HNSWIndex(FlatIndex):
    """Flat index that becomes a graph of bfloat16 vectors at `flat_below` entries.

    Scores of the graph are off by up to 0.001 at 384 dimensions, more at few. Needs the extra
    `hnsw`.

    Parameters
    ----------
    dim : int
        Components of the vectors.
    breadth : int
        Candidates that a search examines: more give better recall and slower searches. The
        attribute may be changed at any time.
    flat_below : int
        Number of entries at which the graph is built.

    Raises
    ------
    MissingExtraError
        If usearch is not installed.
    """

    def __init__(self, dim: int, *, breadth: int = 32, flat_below: int = FLAT_BELOW) -> None:
        try:
            import usearch.index as usearch
        except ImportError as error:
            raise MissingExtraError("usearch", "hnsw", "the index 'hnsw'") from error

        super().__init__(dim)
        self._make: Any = lambda: usearch.Index(
            ndim=dim,
            metric="ip",
            dtype="bf16",
            # Links of a node; more is better recall, more memory and slower insertion.
            connectivity=16,
            expansion_add=128,
            expansion_search=self.breadth,
        )
        self.breadth = breadth
        self._flat_below = flat_below
        self._graph: Any = None
        self._key_of: dict[str, int] = {}
        self._id_of: dict[int, str] = {}
        self._next = 0

    def __len__(self) -> int:
        return super().__len__() if self._graph is None else len(self._key_of)

    def add(self, id: str, vector: Vector) -> None:
        """Add or replace a vector. The entry that reaches `flat_below` makes the graph."""
        row = unit_vector(vector, self.dim)
        if self._graph is not None:
            self._insert(id, row)
            return
        super().add(id, row)

        if len(self) >= self._flat_below:
            # Never back again: vectors leave the graph, but it is not turned into a flat index.
            self._graph = self._make()
            for stored_id, place in self._row_of.items():
                self._insert(stored_id, self._rows[place])
            # The graph has the vectors.
            super().__init__(self.dim)

    def remove(self, id: str) -> bool:
        """Remove a vector, and return whether the id was known."""
        if self._graph is None:
            return super().remove(id)

        key = self._key_of.pop(id, None)
        if key is None:
            return False
        del self._id_of[key]
        self._graph.remove(key)
        return True

    def search(self, vector: Vector, k: int = 1, min_score: float = ANY) -> list[Hit]:
        """Search the nearest vectors: exactly in a flat index, approximately in a graph."""
        if self._graph is None:
            return super().search(vector, k, min_score)

        query = unit_vector(vector, self.dim)
        k = min(k, len(self))
        if k < 1:
            return []
        # Set each time: `breadth` may have been changed since.
        self._graph.expansion_search = self.breadth
        matches = self._graph.search(query, k, threads=1)
        pairs = zip(matches.keys.tolist(), matches.distances.tolist(), strict=True)
        return [
            (self._id_of[key], 1.0 - distance)
            for key, distance in pairs
            if 1.0 - distance >= min_score
        ]

    def scores(self, vector: Vector, ids: Sequence[str]) -> list[float | None]:
        """Return the cosine with the vector of each id, with bfloat16 vectors in a graph."""
        if self._graph is None:
            return super().scores(vector, ids)
        query = unit_vector(vector, self.dim)
        keys = [self._key_of.get(id) for id in ids]
        return [None if key is None else self._cosine(key, query) for key in keys]

    def _cosine(self, key: int, query: Vector) -> float:
        row = np.asarray(self._graph.get(key, dtype="f32"), dtype=np.float32)
        return float(row.dot(query))

    def _insert(self, id: str, row: Vector) -> None:
        old_key = self._key_of.get(id)
        if old_key is not None:
            # A graph changes no vector in place: the old one is removed, and its key not used
            # again.
            del self._id_of[old_key]
            self._graph.remove(old_key)

        # usearch keeps removed keys for a while, so none is used again.
        key = self._next
        self._next += 1

        self._graph.add(key, row)
        self._key_of[id] = key
        self._id_of[key] = id
