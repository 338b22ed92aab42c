"""Prompts that were answered approximately and wait to be computed exactly when nothing else runs, and the purges that such work heeds."""

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from dejakv.request import Prepared, Request, Sampling
from dejakv.store.age import now

MOST = 64
"""Prompts that wait at once; the oldest are dropped first, and stay approximate until they come again."""

MOST_BYTES = 64 << 20
"""Bytes of text and pictures of waiting prompts."""

PREFILL = Sampling(max_new_tokens=1)
"""An answer of one token: it is the state that is wanted."""


@dataclass(frozen=True)
class Waiting:
    """A prompt by its exact key. `epoch`: of the model that answered it; `ttl`: seconds for which it may wait and its state be
    used, from `came` on, 0 without a limit."""

    key: str
    request: Request
    epoch: str
    ttl: float = 0.0
    came: float = 0.0

    @property
    def nbytes(self) -> int:
        return len(self.request.prompt) + len(self.request.chunk) + sum(len(item.data) for item in self.request.media)


@dataclass(frozen=True)
class PromotionCounts:
    """Prompts `waiting` now and `dropped` since the start for want of room."""

    waiting: int = 0
    dropped: int = 0


class Promotions:
    """Waiting prompts, each once, at most `most` of them and `most_bytes` bytes. Thread-safe."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._waiting: OrderedDict[str, Waiting] = OrderedDict()
        self._nbytes = 0
        self._dropped = 0
        self._lock = threading.Lock()

    def note(self, key: str, prepared: Prepared, ttl: float = 0.0) -> None:
        """The prompt of this key was answered approximately. One that waits already becomes the newest."""
        request = replace(prepared.request, sampling=PREFILL, metadata={})
        with self._lock:
            self._remove(key)
            self._add(Waiting(key, request, prepared.epoch, ttl, now()))
            while len(self._waiting) > self._most or self._nbytes > self._most_bytes:
                self._remove(next(iter(self._waiting)))
                self._dropped += 1

    def take(self) -> Waiting | None:
        """The newest waiting prompt, which waits no longer; None if there is none. Its request may keep its state for the time
        that is left of its own."""
        with self._lock:
            while self._waiting:
                item = self._remove(next(reversed(self._waiting)))
                if item is None or not item.ttl:
                    return item
                left = item.came + item.ttl - now()
                if left > 0:
                    return replace(item, request=replace(item.request, ttl=left))
            return None

    def forget(self, key: str) -> None:
        """The prompt was computed exactly."""
        with self._lock:
            self._remove(key)

    def clear(self, partition: str | None) -> None:
        """Forgets one partition's prompts, or all."""
        with self._lock:
            for key in [key for key, item in self._waiting.items() if partition in (None, item.request.partition)]:
                self._remove(key)

    @property
    def counts(self) -> PromotionCounts:
        with self._lock:
            return PromotionCounts(len(self._waiting), self._dropped)

    def __len__(self) -> int:
        return len(self._waiting)

    def _add(self, item: Waiting) -> None:
        self._waiting[item.key] = item
        self._nbytes += item.nbytes

    def _remove(self, key: str) -> Waiting | None:
        item = self._waiting.pop(key, None)
        if item is not None:
            self._nbytes -= item.nbytes
        return item


class Removals:
    """The last purge or clearing of each partition: work that began before it is not stored. Thread-safe."""

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
