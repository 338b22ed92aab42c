"""Prompts that were answered approximately: when one comes again, it runs exactly and is stored, so exact caching never starves."""

import threading
from collections import OrderedDict

REMEMBERED = 100_000
"""Prompts remembered at once; the oldest are forgotten first, and are then answered approximately again."""


class Promotions:
    """Keys of such prompts and the partition of each. Thread-safe."""

    def __init__(self) -> None:
        self._partitions: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, key: str, partition: str) -> None:
        """The prompt of this key was answered approximately."""
        with self._lock:
            self._partitions[key] = partition
            if len(self._partitions) > REMEMBERED:
                self._partitions.popitem(last=False)

    def due(self, key: str) -> bool:
        """Whether the prompt is to run exactly now."""
        with self._lock:
            return key in self._partitions

    def forget(self, key: str) -> None:
        """The prompt was run exactly."""
        with self._lock:
            self._partitions.pop(key, None)

    def clear(self, partition: str | None = None) -> None:
        """Forgets one partition's prompts, or all."""
        with self._lock:
            for key in [key for key, whose in self._partitions.items() if partition in (None, whose)]:
                del self._partitions[key]
