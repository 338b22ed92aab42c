"""Entries that may be used for a limited time only: expired ones are not found, and leave soon.

Reading never waits for a removal: an expired entry is passed over at once, and a thread removes it when its time has come. Its
rows stay only while prompts that begin with them stay.
"""

import heapq
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from dejakv.errors import StoreError
from dejakv.store.age import SKEW, Clock, is_older
from dejakv.store.age import now as steady
from dejakv.store.base import NODE, Chunk, ChunkMeta, Rows, Scrubs, Store
from dejakv.store.counters import logger
from dejakv.store.wrapper import WrapperStore

LONGEST_WAIT = 60.0
"""Seconds after which the clock is looked at again at the latest: it may have been set forward."""
RESCAN = 3600.0
"""Seconds after which all entries are looked through, for those of processes that have died."""

MOST_GONE = 64
"""Entries beyond as many as there are that may stand in the queue although they have left."""


def is_expired(meta: ChunkMeta, now: float) -> bool:
    return meta.ttl > 0 and is_older(meta.created, meta.ttl, now)


def remaining(meta: ChunkMeta, now: float) -> float:
    """Seconds that an entry has left, 0 for one without a limit; never less than a tiny time for one with a limit."""
    return max(1e-9, meta.created + meta.ttl - now) if meta.ttl else 0.0


def shortest(*lifetimes: float | None) -> float:
    """The shortest of several limits in seconds; 0 and None are no limits."""
    return min((one for one in lifetimes if one), default=0.0)


class ExpiringStore(WrapperStore):
    """A store in which entries with a `ttl` are not found when that time is over. Thread-safe.

    clock       seconds since 1970
    background  False: nothing is removed but by `sweep`
    look_first  learn at once what is there; elsewhere the cache over the store lists its entries when it is opened

    A process that has a folder open removes what it has seen there; what no open process has seen leaves when the folder is
    opened next.
    """

    def __init__(
        self, inner: Store, clock: Clock = steady, *, background: bool = True, look_first: bool = False
    ) -> None:
        super().__init__(inner)
        self._clock = clock
        self._background = background
        self._due: list[tuple[float, str]] = []
        self._known: dict[str, float] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._scanned = clock()
        self._traces = False
        inner.on_evict(self._forget)
        if look_first:
            self._look()

    def put(self, chunk: Chunk) -> bool:
        return self._put(chunk, self.inner.put)

    def put_part(self, chunk: Chunk) -> bool:
        return self._put(chunk, super().put_part)

    def _put(self, chunk: Chunk, put: Callable[[Chunk], bool]) -> bool:
        meta = chunk.meta if chunk.meta.created else replace(chunk.meta, created=self._clock())
        stored = put(replace(chunk, meta=meta))
        if stored:
            self._learn(meta)
        return stored

    def get(self, id: str) -> Chunk | None:
        return self._alive(self.inner.get(id))

    def get_parts(self, id: str, rows: Rows) -> Sequence[Chunk] | None:
        return super().get_parts(id, rows) if self.meta(id) is not None else None

    def meta(self, id: str) -> ChunkMeta | None:
        meta = self.inner.meta(id)
        return meta if meta is not None and self._usable(meta) else None

    def metas(self, partition: str | None = None, epoch: str | None = None) -> Iterator[ChunkMeta]:
        return (meta for meta in self.inner.metas(partition, epoch) if self._usable(meta))

    def added(self, mark: Any = None) -> tuple[list[ChunkMeta], Any]:
        metas, mark = super().added(mark)
        return [meta for meta in metas if self._usable(meta)], mark

    def sweep(self) -> int:
        """Removes what has expired, and the traces of it; how many entries."""
        now, removed = self._clock(), 0
        if is_older(self._scanned, RESCAN, now):
            self._look()
        for id in self._expired(now):
            meta = self.inner.meta(id)
            if meta is None or meta.kind == NODE:
                continue
            if not is_expired(meta, now):  # stored anew meanwhile
                self._learn(meta)
            elif self.inner.delete(id):
                removed += 1
            else:
                self._learn(meta, now + LONGEST_WAIT)
        self._traces = self._traces or removed > 0
        if self._traces:
            self._scrub()
        return removed

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        super().close()

    def _usable(self, meta: ChunkMeta) -> bool:
        self._learn(meta)
        return not is_expired(meta, self._clock())

    def _alive(self, chunk: Chunk | None) -> Chunk | None:
        return chunk if chunk is not None and self._usable(chunk.meta) else None

    def _learn(self, meta: ChunkMeta, due: float | None = None) -> None:
        """Notes when an entry is to be removed."""
        if not meta.ttl:
            return
        due = meta.created + meta.ttl if due is None else due
        if meta.created > self._clock() + SKEW:
            due = 0.0  # nobody knows how old it is
        with self._changed:
            if self._closed or ((known := self._known.get(meta.id)) is not None and known <= due):
                return
            self._known[meta.id] = due
            heapq.heappush(self._due, (due, meta.id))
            self._start()
            self._changed.notify_all()

    def _forget(self, id: str) -> None:
        """An entry has left before its time."""
        with self._changed:
            if self._known.pop(id, None) is None:
                return
            if len(self._due) > 2 * len(self._known) + MOST_GONE:
                self._due = [(due, one) for one, due in self._known.items()]
                heapq.heapify(self._due)
        meta = self.inner.meta(id)
        if meta is not None:  # stored again before its removal was told
            self._learn(meta)

    def _expired(self, now: float) -> list[str]:
        found: list[str] = []
        with self._changed:
            while self._due and self._due[0][0] <= now:
                due, id = heapq.heappop(self._due)
                if self._known.get(id) == due:
                    del self._known[id]
                    found.append(id)
        return found

    def _look(self) -> None:
        self._scanned = self._clock()
        for meta in self.inner.metas():
            self._learn(meta)

    def _scrub(self) -> None:
        below = self.inner
        while isinstance(below, WrapperStore):
            below = below.inner
        try:
            if isinstance(below, Scrubs):
                below.scrub()
            self._traces = False
        except StoreError as error:
            logger.warning("traces of expired entries are removed later: %s", error)

    def _start(self) -> None:
        # A thread does not survive a fork, so check each time whether it is alive.
        if self._background and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name="dejakv-expiry", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                wait = self._due[0][0] - self._clock() if self._due and not self._traces else LONGEST_WAIT
                if wait > 0 and not self._closed:
                    self._changed.wait(min(wait, LONGEST_WAIT))
                if self._closed:
                    return
            try:
                self.sweep()
            except Exception:  # nobody waits for it, and the next sweep may succeed
                logger.exception("expired entries could not be removed")
