"""Uses and removals that are still to be written."""

import threading
from collections.abc import Iterable


class PendingUses:
    """Uses to be written later, in the order of the last use of each id. Thread-safe."""

    def __init__(self) -> None:
        self._hits: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, id: str) -> int:
        """Notes a use; returns the number of pending ids."""
        with self._lock:
            # Removed and inserted again: a dictionary keeps the order of insertion.
            self._hits[id] = self._hits.pop(id, 0) + 1
            return len(self._hits)

    def discard(self, id: str) -> None:
        with self._lock:
            self._hits.pop(id, None)

    def take(self) -> dict[str, int]:
        """Returns all pending uses and clears them."""
        with self._lock:
            taken, self._hits = self._hits, {}
        return taken

    def put_back(self, taken: dict[str, int]) -> None:
        """Restores uses that could not be written, before all later ones."""
        with self._lock:
            newer, self._hits = self._hits, dict(taken)
            for id, hits in newer.items():
                self._hits[id] = self._hits.pop(id, 0) + hits


class Condemned:
    """Damaged rows that are not yet removed, because another process was writing. Thread-safe.

    A row that has got a new file meanwhile is no longer condemned.
    """

    def __init__(self) -> None:
        self._files: dict[int, str | None] = {}
        self._lock = threading.Lock()

    def add(self, number: int, file: str | None) -> bool:
        """False if it was known already."""
        with self._lock:
            known = self._files.get(number, "") == file
            self._files[number] = file
            return not known

    def has(self, number: int, file: str) -> bool:
        with self._lock:
            return self._files.get(number) == file

    def all(self) -> dict[int, str | None]:
        with self._lock:
            return dict(self._files)

    def forget(self, numbers: Iterable[int]) -> None:
        with self._lock:
            for number in numbers:
                self._files.pop(number, None)
