"""Exact search by FAISS over a growing buffer."""

from collections.abc import Sequence

import numpy as np

from dejakv.vectors.base import ANY, Hit, Vector, unit_vector


class FlatIndex:
    """Vectors by id, where a search compares with every vector. Not thread-safe.

    Vectors are normalized when they are added, so every score is a cosine in [-1, 1]. The rows are
    in one buffer (4 bytes a component), which `faiss.knn_inner_product` reads directly: an empty
    space costs a few hundred bytes, nothing is trained, and a deletion moves the last row into the
    gap.

    Parameters
    ----------
    dim : int
        Components of the vectors.

    Raises
    ------
    ConfigError
        From every method that takes a vector, if it has another dimension.
    InputError
        From every method that takes a vector, if it has no direction (zero, NaN, infinite).

    Examples
    --------
    >>> index = FlatIndex(2)
    >>> index.add("east", np.array([1, 0]))
    >>> index.add("north", np.array([0, 5]))
    >>> index.search(np.array([3, 0]), 1)
    [('east', 1.0)]
    """

    def __init__(self, dim: int) -> None:
        # As the cache is built, rather than in its first request.
        import faiss

        self._faiss = faiss
        self.dim = dim
        self._rows = np.empty((0, dim), dtype=np.float32)
        self._ids: list[str] = []
        self._row_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, id: str, vector: Vector) -> None:
        """Add a vector, or replace the vector of a known id."""
        row = unit_vector(vector, self.dim)
        place = self._row_of.get(id)
        if place is None:
            place = len(self._ids)
            if place == len(self._rows):
                self._grow()
            self._ids.append(id)
            self._row_of[id] = place

        self._rows[place] = row

    def remove(self, id: str) -> bool:
        """Remove a vector, and return whether the id was known."""
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
        """Search the nearest vectors.

        Parameters
        ----------
        vector : Vector, shape [dim]
            The query.
        k : int
            Maximum number of results.
        min_score : float
            Least cosine of a result.

        Returns
        -------
        list[tuple[str, float]]
            Ids and cosines, best first.
        """
        query = unit_vector(vector, self.dim)
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
            pointer(query),
            pointer(self._rows),
            self.dim,
            1,
            count,
            k,
            pointer(scores),
            pointer(places),
        )

        pairs = zip(places.tolist(), scores.tolist(), strict=True)
        return [(self._ids[place], score) for place, score in pairs if score >= min_score]

    def scores(self, vector: Vector, ids: Sequence[str]) -> list[float | None]:
        """Return the cosine with the vector of each id, None for an unknown id."""
        query = unit_vector(vector, self.dim)
        places = [self._row_of.get(id) for id in ids]
        return [None if place is None else float(self._rows[place].dot(query)) for place in places]

    def _grow(self) -> None:
        capacity = len(self._rows)
        # Doubling wastes half of a large buffer; a quarter more keeps a million rows near what they
        # need.
        bigger = _aligned(
            max(4, capacity * 2 if capacity < 65_536 else capacity + capacity // 4), self.dim
        )
        bigger[:capacity] = self._rows
        self._rows = bigger


def _aligned(rows: int, dim: int) -> Vector:
    """Allocate a buffer aligned to a cache line: other products take up to 1.4 times as long."""
    raw = np.empty(rows * dim * 4 + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + rows * dim * 4].view(np.float32).reshape(rows, dim)
