"""One small index for each space, so that nothing is ever compared across spaces."""

import threading

from dejakv.index.base import Vector, VectorIndex, unit
from dejakv.index.factory import make_index


class Spaces:
    """Donors by space. A space is created with its first donor and dropped with its last; thousands of small ones are cheap.

    A donor is in one space at a time. Each space has its own lock: a search of a large one delays no other.
    """

    def __init__(self, dim: int, kind: str = "flat") -> None:
        make_index(kind, dim)
        self.dim = dim
        self.kind = kind
        self._index_of: dict[str, VectorIndex] = {}
        self._space_of: dict[str, str] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._space_of)

    def __contains__(self, donor: object) -> bool:
        return donor in self._space_of

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(index.nbytes for index in self._index_of.values())

    def get(self, space: str) -> VectorIndex | None:
        """The index of a space; None if nothing was added."""
        return self._index_of.get(space)

    def add(self, space: str, donor: str, vector: Vector) -> None:
        """Adds or replaces. Raises like `VectorIndex.add`, and then changes nothing."""
        row = unit(vector, self.dim)
        with self._lock:
            if self._space_of.get(donor, space) != space:
                self._drop(donor)
            index = self._index_of.get(space)
            if index is None:
                index = self._index_of[space] = make_index(self.kind, self.dim)
            index.add(donor, row)
            self._space_of[donor] = space

    def remove(self, donor: str) -> bool:
        with self._lock:
            return self._drop(donor)

    def _drop(self, donor: str) -> bool:
        space = self._space_of.pop(donor, None)
        if space is None:
            return False
        index = self._index_of[space]
        index.remove(donor)
        if not len(index):
            del self._index_of[space]
        return True
