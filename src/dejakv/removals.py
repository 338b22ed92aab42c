"""When entries were removed on purpose: what was begun before a removal must not be stored after it."""

import threading


class Removals:
    """Remembers the last purge or clearing of each partition. Thread-safe."""

    def __init__(self) -> None:
        self._number = 0
        self._last: dict[str | None, int] = {}
        self._lock = threading.Lock()

    def note(self, partition: str | None) -> None:
        """One begins, of a partition or of all."""
        with self._lock:
            self._number += 1
            self._last[partition] = self._number

    def mark(self) -> int:
        """Now, for `since`. Taken before it is known of which partition the work will be."""
        return self._number

    def since(self, mark: int, partition: str) -> bool:
        """Whether one that may concern the partition has begun after the mark."""
        with self._lock:
            return max(self._last.get(partition, 0), self._last.get(None, 0)) > mark
