"""Where evidence is kept: the seam, and the one in memory."""

from collections.abc import Callable, Iterator
from typing import Protocol

from cachetools import FIFOCache

from dejakv.trust import forks
from dejakv.trust.draw import ClassKey, Draw
from dejakv.trust.state import State

Change = Callable[[State], State]


class Ledger(Protocol):
    """Thread-safe. Keeps a state for each class, and changes it in one step that no other process comes between.

    cold_starts  how often evidence was damaged, so that it began anew
    """

    @property
    def cold_starts(self) -> int: ...

    def read(self, cls: ClassKey) -> State | None:
        """What is known; None of a class that nothing is known of, or whose evidence is damaged. Raises: StoreError if it cannot be read."""
        ...

    def change(self, cls: ClassKey, change: Change, *, once: str = "") -> State:
        """Applies a change to what is known and returns the result, or what is known if a change named `once` was made before.

        Raises: StoreError if it cannot be written: then nothing has changed.
        """
        ...

    def note(self, draw: Draw) -> None:
        """Notes a draw that is to be labelled, until a change of its name or `drop`. Raises: StoreError."""
        ...

    def drop(self, id: str) -> None:
        """The draw gets no label. Raises: StoreError."""
        ...

    def missing(self) -> list[Draw]:
        """Noted draws of processes that have ended. Raises: StoreError."""
        ...

    def classes(self, group: str | None = None) -> Iterator[tuple[ClassKey, State]]:
        """All that is known, or all of one group."""
        ...

    def forget(self, group: str) -> None:
        """Removes all that is known of a group. Raises: StoreError."""
        ...

    def close(self) -> None: ...


class MemoryLedger:
    """Evidence of this process alone, which ends with it."""

    cold_starts = 0

    def __init__(self) -> None:
        self._states: FIFOCache[ClassKey, State] = FIFOCache(MOST_CLASSES)
        self._made: FIFOCache[str, None] = FIFOCache(REMEMBERED)
        self._lock = forks.lock(forks.LEDGER)

    def read(self, cls: ClassKey) -> State | None:
        with self._lock:
            return self._states.get(cls)

    def change(self, cls: ClassKey, change: Change, *, once: str = "") -> State:
        with self._lock:
            state = self._states.get(cls) or State()
            if once and once in self._made:
                return state
            state = change(state)
            self._states[cls] = state
            if once:
                self._made[once] = None
            return state

    def note(self, draw: Draw) -> None:
        """Nothing is left of a process that has ended."""

    def drop(self, id: str) -> None:
        """Nothing was noted."""

    def missing(self) -> list[Draw]:
        return []

    def classes(self, group: str | None = None) -> Iterator[tuple[ClassKey, State]]:
        with self._lock:
            found = list(self._states.items())
        return iter([(cls, state) for cls, state in found if group in (None, cls.group)])

    def forget(self, group: str) -> None:
        with self._lock:
            for cls in [cls for cls in self._states if cls.group == group]:
                del self._states[cls]

    def close(self) -> None:
        """Nothing to be closed."""


MOST_CLASSES = 10_000
"""Classes of which evidence is kept; that of the one that was changed longest ago goes first, and would begin anew."""

MOST_EPOCHS = 4
"""Models of which a folder keeps evidence for one method, setting and group: those that were served last."""

REMEMBERED = 10_000
"""Changes whose names are remembered, so that none is made twice."""
