"""How often entries were removed on purpose: what was begun before a removal must not be stored after it."""

import threading
from collections import Counter


class Removals:
    """Counts purges and clearings by partition. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str | None] = Counter()
        self._lock = threading.Lock()

    def note(self, partition: str | None) -> None:
        """One begins, of a partition or of all."""
        with self._lock:
            self._counts[partition] += 1

    def before(self, partition: str) -> int:
        """How many have begun that may concern a partition. Compared later, it tells whether there was another one."""
        with self._lock:
            return self._counts[partition] + self._counts[None]
