"""Approximate search over a graph (HNSW, Malkov & Yashunin, arXiv 1603.09320) by usearch, for large spaces."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dejakv.errors import MissingExtraError
from dejakv.vectors.base import ANY, Hit, Vector, unit
from dejakv.vectors.flat import FlatIndex

FLAT_BELOW = 2048
"""Number of entries below which every vector is compared: faster than a graph, and exact."""


class HNSWIndex:
    """A graph of bfloat16 vectors (scores are off by up to 0.001 at 384 dimensions, more at few). Needs the extra `hnsw`.

    connectivity  links of a node; more is better recall, more memory and slower insertion
    breadth       candidates a search examines; more is better recall and slower; it may be changed at any time
    """

    def __init__(
        self,
        dim: int,
        *,
        connectivity: int = 16,
        breadth: int = 32,
        build_breadth: int = 128,
        flat_below: int = FLAT_BELOW,
    ) -> None:
        try:
            import usearch.index as usearch
        except ImportError as error:
            raise MissingExtraError("usearch", "hnsw", "the index 'hnsw'") from error
        self._make: Any = lambda: usearch.Index(
            ndim=dim,
            metric="ip",
            dtype="bf16",
            connectivity=connectivity,
            expansion_add=build_breadth,
            expansion_search=self.breadth,
        )
        self._dim = dim
        self.breadth = breadth
        self._flat_below = flat_below
        self._flat: FlatIndex | None = FlatIndex(dim)
        self._graph: Any = None
        self._key_of: dict[str, int] = {}
        self._id_of: dict[int, str] = {}
        self._next = 0

    @property
    def dim(self) -> int:
        return self._dim

    @property
    def nbytes(self) -> int:
        if self._flat is not None:
            return self._flat.nbytes
        return int(self._graph.memory_usage)

    def __len__(self) -> int:
        return len(self._key_of) if self._flat is None else len(self._flat)

    def __contains__(self, id: object) -> bool:
        return id in self._key_of if self._flat is None else id in self._flat

    def add(self, id: str, vector: Vector) -> None:
        row = unit(vector, self._dim)
        if self._flat is not None:
            self._flat.add(id, row)
            if len(self._flat) >= self._flat_below:
                self._build(self._flat)
            return
        self._insert(id, row)

    def remove(self, id: str) -> bool:
        if self._flat is not None:
            return self._flat.remove(id)
        key = self._key_of.pop(id, None)
        if key is None:
            return False
        del self._id_of[key]
        self._graph.remove(key)
        return True

    def search(self, vector: Vector, k: int = 1, least: float = ANY) -> list[Hit]:
        query = unit(vector, self._dim)
        if self._flat is not None:
            return self._flat.search(query, k, least)
        k = min(k, len(self._key_of))
        if k < 1:
            return []
        self._graph.expansion_search = self.breadth
        found = self._graph.search(query, k, threads=1)
        pairs = zip(found.keys.tolist(), found.distances.tolist(), strict=True)
        return [(self._id_of[key], 1.0 - distance) for key, distance in pairs if 1.0 - distance >= least]

    def scores(self, vector: Vector, ids: Sequence[str]) -> list[float | None]:
        query = unit(vector, self._dim)
        if self._flat is not None:
            return self._flat.scores(query, ids)
        keys = [self._key_of.get(id) for id in ids]
        return [None if key is None else self._cosine(key, query) for key in keys]

    def _cosine(self, key: int, query: Vector) -> float:
        row = np.asarray(self._graph.get(key, dtype="f32"), dtype=np.float32)
        return float(row.dot(query))

    def _build(self, flat: FlatIndex) -> None:
        self._graph = self._make()
        self._flat = None
        for id, row in flat.items():
            self._insert(id, row)

    def _insert(self, id: str, row: Vector) -> None:
        known = self._key_of.get(id)
        if known is not None:
            del self._id_of[known]
            self._graph.remove(known)
        # A key is never reused: a search in progress cannot mistake a new entry for an old one.
        key = self._next
        self._next += 1
        self._graph.add(key, row)
        self._key_of[id] = key
        self._id_of[key] = id
