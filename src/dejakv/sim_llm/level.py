"""The level of tasks: embeddings of whole tasks, found by locality-sensitive hashing."""

import threading
from collections.abc import Mapping

from dejakv.index.lsh import LSHIndex
from dejakv.levels.base import Match, Query, Search

LAYER = "task"
"""Name of the level, and of the vector that it compares (`Query.vectors`)."""


class TaskLevel:
    """A level of the common core over one `LSHIndex` a space. Thread-safe.

    most  candidates of a search
    """

    name = LAYER
    status_names = (LAYER,)

    def __init__(self, embedding_dim: int, num_hyperplanes: int, seed: int, threshold: float, most: int = 4) -> None:
        self._make = lambda: LSHIndex(embedding_dim, num_hyperplanes, seed)
        self.index = self._make()
        """An empty index with the planes of all; for hashes."""
        self.threshold = threshold
        self._most = most
        self._indexes: dict[str, LSHIndex] = {}
        self._space_of: dict[str, str] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._space_of)

    @property
    def thresholds(self) -> Mapping[str, float]:
        return {LAYER: self.threshold}

    def search(self, query: Query) -> Search:
        vector, index = query.vectors.get(LAYER), self._indexes.get(query.space)
        if vector is None:
            return Search((), {LAYER: "skip"})
        hits = index.search(vector, self._most, self.threshold) if index is not None else []
        matches = tuple(Match(donor, LAYER, score) for donor, score in hits)
        return Search(matches, {LAYER: "hit" if matches else "miss"})

    def add(self, donor: str, query: Query) -> None:
        vector = query.vectors.get(LAYER)
        if vector is None:
            return
        with self._lock:
            self._drop(donor)
            self._indexes.setdefault(query.space, self._make()).add(donor, vector)
            self._space_of[donor] = query.space

    def remove(self, donor: str) -> None:
        with self._lock:
            self._drop(donor)

    def _drop(self, donor: str) -> None:
        space = self._space_of.pop(donor, None)
        if space is not None:
            self._indexes[space].remove(donor)
            if not len(self._indexes[space]):
                del self._indexes[space]
