"""Exact search over a growing buffer: FAISS for large spaces, numpy for the many small ones of a cache."""

from collections.abc import Sequence

import numpy as np

from dejakv.vectors.base import ANY, Hit, Vector, unit

NUMPY_BELOW = 2048
"""Rows below which one matrix-vector product is quicker than a call of FAISS."""


def _aligned(rows: int, dim: int) -> Vector:
    """An empty buffer aligned to a cache line: a product with an unaligned one takes up to 1.4 times as long."""
    raw = np.empty(rows * dim * 4 + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + rows * dim * 4].view(np.float32).reshape(rows, dim)


def _by_score(hit: Hit) -> float:
    return -hit[1]


class FlatIndex:
    """Compares with every vector: always finds the nearest. 4 bytes a component, no training, deletion by id.

    Rows are kept in one buffer, which `faiss.knn_inner_product` reads directly: an empty space costs a few hundred
    bytes, and a deletion moves the last row into the gap.

    >>> index = FlatIndex(2)
    >>> index.add("east", np.array([1, 0]))
    >>> index.add("north", np.array([0, 5]))
    >>> index.search(np.array([3, 0]), 1)
    [('east', 1.0)]
    """

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._rows = np.empty((0, dim), dtype=np.float32)
        self._ids: list[str] = []
        self._row_of: dict[str, int] = {}

    @property
    def dim(self) -> int:
        return self._dim

    @property
    def nbytes(self) -> int:
        return int(self._rows.nbytes)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, id: object) -> bool:
        return id in self._row_of

    def add(self, id: str, vector: Vector) -> None:
        row = unit(vector, self._dim)
        place = self._row_of.get(id)
        if place is None:
            place = len(self._ids)
            if place == len(self._rows):
                self._grow()
            self._ids.append(id)
            self._row_of[id] = place
        self._rows[place] = row

    def remove(self, id: str) -> bool:
        hole = self._row_of.pop(id, None)
        if hole is None:
            return False
        last = self._ids.pop()
        if last != id:
            self._rows[hole] = self._rows[len(self._ids)]
            self._ids[hole] = last
            self._row_of[last] = hole
        return True

    def search(self, vector: Vector, k: int = 1, least: float = ANY) -> list[Hit]:
        query = unit(vector, self._dim)
        count = len(self._ids)
        if count == 0 or k < 1:
            return []
        if count < NUMPY_BELOW:
            return self._search_numpy(query, count, k, least)
        hits = self._search_faiss(query, count, min(k, count))
        return hits if hits[-1][1] >= least else [hit for hit in hits if hit[1] >= least]

    def scores(self, vector: Vector, ids: Sequence[str]) -> list[float | None]:
        query = unit(vector, self._dim)
        places = [self._row_of.get(id) for id in ids]
        return [None if place is None else float(self._rows[place].dot(query)) for place in places]

    def items(self) -> list[tuple[str, Vector]]:
        """Every id with a copy of its unit vector."""
        return [(id, self._rows[place].copy()) for id, place in self._row_of.items()]

    def _search_numpy(self, query: Vector, count: int, k: int, least: float) -> list[Hit]:
        scores = self._rows[:count].dot(query)
        places = (scores >= least).nonzero()[0]
        if len(places) > 4 * k:  # sort few: usually the threshold has left few, otherwise a partition does
            places = places[np.argpartition(scores[places], len(places) - k)[-k:]]
        ids = self._ids
        pairs: list[tuple[int, float]] = list(zip(places.tolist(), scores[places].tolist(), strict=True))
        hits = [(ids[place], score) for place, score in pairs]
        hits.sort(key=_by_score)
        return hits[:k]

    def _search_faiss(self, query: Vector, count: int, k: int) -> list[Hit]:
        import faiss

        scores = np.empty(k, dtype=np.float32)
        places = np.empty(k, dtype=np.int64)
        pointer = faiss.swig_ptr
        faiss.knn_inner_product(
            pointer(query), pointer(self._rows), self._dim, 1, count, k, pointer(scores), pointer(places)
        )
        return [(self._ids[place], score) for place, score in zip(places.tolist(), scores.tolist(), strict=True)]

    def _grow(self) -> None:
        held = len(self._rows)
        # Doubling wastes half of a large buffer; a quarter more keeps a million rows near what they need.
        bigger = _aligned(max(4, held * 2 if held < 65_536 else held + held // 4), self._dim)
        bigger[:held] = self._rows
        self._rows = bigger
