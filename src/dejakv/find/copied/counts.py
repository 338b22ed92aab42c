"""What the search for copied text found, counted a partition."""

import threading
from dataclasses import dataclass, fields


@dataclass
class CopiedCounts:
    """searches    prompts that were looked up; `hits` of them had a run in the store
    tokens      tokens of these prompts; `covered` of them stood in runs
    candidates  places compared; `dropped` were too many to be compared
    gone        donors that left the store before they were compared
    evicted     chunks that left the index for its memory limit; `refused` were too large for it
    """

    searches: int = 0
    hits: int = 0
    tokens: int = 0
    covered: int = 0
    candidates: int = 0
    dropped: int = 0
    gone: int = 0
    evicted: int = 0
    refused: int = 0

    def add(self, **more: int) -> None:
        for name, count in more.items():
            setattr(self, name, getattr(self, name) + count)


class CountsOf:
    """The counts of every partition. Thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[str, CopiedCounts] = {}
        self._lock = threading.Lock()

    def add(self, partition: str, **more: int) -> None:
        """Adds to the counts of one partition."""
        with self._lock:
            self._counts.setdefault(partition, CopiedCounts()).add(**more)

    def of(self, partition: str | None) -> CopiedCounts:
        """A copy of one partition's counts; None sums over all."""
        total = CopiedCounts()
        with self._lock:
            for name, counts in self._counts.items():
                if partition in (None, name):
                    total.add(**{field.name: getattr(counts, field.name) for field in fields(counts)})
        return total

    def clear(self, partition: str) -> None:
        """Forgets one partition's counts."""
        with self._lock:
            self._counts.pop(partition, None)
