"""Exact search by FAISS over a growing buffer."""

from collections.abc import Sequence

import numpy as np

from dejakv.vectors.base import ANY, Hit, Vector, unit


class FlatIndex:
    """Vectors by id; a search compares with every one. 4 bytes a component, no training, deletion by id. Not thread-safe.

    Vectors are normalized when added, so every score is a cosine in [-1, 1]. Rows are kept in one buffer, which
    `faiss.knn_inner_product` reads directly: an empty space costs a few hundred bytes, and a deletion moves the last row into the gap.

    Raises: ConfigError for a vector of another dimension, InputError for one without a direction (zero, NaN, infinite).

    >>> index = FlatIndex(2)
    >>> index.add("east", np.array([1, 0]))
    >>> index.add("north", np.array([0, 5]))
    >>> index.search(np.array([3, 0]), 1)
    [('east', 1.0)]
    """

    def __init__(self, dim: int) -> None:
        import faiss  # as the cache is built, rather than in its first request

        self._faiss = faiss
        self.dim = dim
        self._rows = np.empty((0, dim), dtype=np.float32)
        self._ids: list[str] = []
        self._row_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, id: str, vector: Vector) -> None:
        """Adds a vector, or replaces the one of a known id."""
        row = unit(vector, self.dim)
        place = self._row_of.get(id)
        if place is None:
            place = len(self._ids)
            if place == len(self._rows):
                self._grow()
            self._ids.append(id)
            self._row_of[id] = place

        self._rows[place] = row

    def remove(self, id: str) -> bool:
        """Removes a vector; False for an unknown id."""
        hole = self._row_of.pop(id, None)
        if hole is None:
            return False
        last = self._ids.pop()
        if last != id:
            self._rows[hole] = self._rows[len(self._ids)]
            self._ids[hole] = last
            self._row_of[last] = hole
        return True

    def search(self, vector: Vector, k: int = 1, min_score: float = ANY) -> list[Hit]:
        """At most `k` pairs (id, cosine), best first, none with a cosine below `min_score`."""
        query = unit(vector, self.dim)
        count = len(self._ids)
        # faiss fills missing places with -1.
        k = min(k, count)
        if k < 1:
            return []
        scores = np.empty(k, dtype=np.float32)
        places = np.empty(k, dtype=np.int64)
        pointer = self._faiss.swig_ptr
        # Up to `count` alone: what is behind it is room, or left from removed vectors.
        self._faiss.knn_inner_product(
            pointer(query), pointer(self._rows), self.dim, 1, count, k, pointer(scores), pointer(places)
        )

        pairs = zip(places.tolist(), scores.tolist(), strict=True)
        return [(self._ids[place], score) for place, score in pairs if score >= min_score]

    def scores(self, vector: Vector, ids: Sequence[str]) -> list[float | None]:
        """The cosine with each of these ids; None for an unknown one."""
        query = unit(vector, self.dim)
        places = [self._row_of.get(id) for id in ids]
        return [None if place is None else float(self._rows[place].dot(query)) for place in places]

    def _grow(self) -> None:
        capacity = len(self._rows)
        # Doubling wastes half of a large buffer; a quarter more keeps a million rows near what they need.
        bigger = _aligned(max(4, capacity * 2 if capacity < 65_536 else capacity + capacity // 4), self.dim)
        bigger[:capacity] = self._rows
        self._rows = bigger


def _aligned(rows: int, dim: int) -> Vector:
    """An empty buffer aligned to a cache line: a product with an unaligned one takes up to 1.4 times as long."""
    raw = np.empty(rows * dim * 4 + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + rows * dim * 4].view(np.float32).reshape(rows, dim)
