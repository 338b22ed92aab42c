"""Storing in the background: what is handed over can be found and read at once, and a thread stores it.

A full queue drops new chunks rather than waiting.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from dejakv.store.age import now
from dejakv.store.base import Chunk, ChunkMeta, Rows, Store, StoreStats, Tensor
from dejakv.store.counters import Counters, Listeners, logger
from dejakv.store.expiry import is_expired
from dejakv.store.wrapper import WrapperStore

Capture = Callable[[], Tensor | None]
Complete = Callable[[ChunkMeta], ChunkMeta | None]
After = Callable[[ChunkMeta], object]


@dataclass(frozen=True)
class WriterStats:
    """Outcomes of submissions. `empty`: there was no state; `refused`: by the store; `dropped`: the queue was full, the writer
    closed, or the chunk was removed before it was stored; `errors`: a callback or the store raised."""

    submitted: int = 0
    stored: int = 0
    empty: int = 0
    refused: int = 0
    dropped: int = 0
    errors: int = 0


class _Queued:
    """A chunk that waits to be stored. Its state is copied once, by who needs it first: the writer or a reader."""

    def __init__(self, meta: ChunkMeta, capture: Capture, complete: Complete | None, after: After | None) -> None:
        self.meta = meta
        self.complete = complete
        self.after = after
        self._capture: Capture | None = capture
        self._tensor: Tensor | None = None
        self._lock = threading.Lock()

    def chunk(self) -> Chunk | None:
        with self._lock:
            if self._capture is not None:
                capture, self._capture = self._capture, None
                self._tensor = capture()
            tensor = self._tensor
        return None if tensor is None else Chunk(replace(self.meta, nbytes=tensor.nbytes), tensor)


class Writer(WrapperStore):
    """A store that stores submitted chunks in `inner`, one after another, in its own thread. Until one is stored, it is found and
    read from the queue. Thread-safe.

    background  False: `submit` does the work before it returns (tests, scripts)
    max_queue   largest number of waiting chunks; it is small, because each keeps a prompt's state in memory
    """

    def __init__(self, inner: Store, *, background: bool = True, max_queue: int = 32) -> None:
        super().__init__(inner)
        self._background = background
        self._queue: queue.Queue[_Queued | None] = queue.Queue(max_queue)
        self._queued: dict[str, _Queued] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._outcomes = WriterStats()
        self._counters = Counters()
        self._listeners = Listeners()

    def submit(
        self, meta: ChunkMeta, capture: Capture, *, complete: Complete | None = None, after: After | None = None
    ) -> bool:
        """Submits a chunk. Never blocks on the store and never raises. False if it was dropped (`outcomes.dropped`).

        capture   copies the state, None if there is none; called once, by the writer or an earlier reader
        complete  called before the chunk is stored: its description with what takes time, None not to store it
        after     called with the description of a stored chunk
        """
        item = _Queued(meta, capture, complete, after)
        with self._lock:
            accepted = not self._closed
            if accepted:
                before = self._queued.get(meta.id)
                self._queued[meta.id] = item
                if self._background:
                    try:
                        self._queue.put_nowait(item)
                        self._start()
                    except queue.Full:
                        accepted = False
                        del self._queued[meta.id]
                        if before is not None:
                            self._queued[meta.id] = before
        self._count("submitted")
        if not accepted:
            self._count("dropped")
        elif not self._background:
            self._work(item)
        return accepted

    def get(self, id: str) -> Chunk | None:
        chunk = self._waiting(id)
        return chunk if chunk is not None else super().get(id)

    def get_parts(self, id: str, rows: Rows) -> Sequence[Chunk] | None:
        """See `LoadsParts`; a queued chunk is whole."""
        chunk = self._waiting(id)
        return (chunk,) if chunk is not None else super().get_parts(id, rows)

    def meta(self, id: str) -> ChunkMeta | None:
        item = self._usable(id)
        return item.meta if item is not None else super().meta(id)

    def metas(self, partition: str | None = None, epoch: str | None = None) -> Iterator[ChunkMeta]:
        seen: set[str] = set()
        for id, item in list(self._queued.items()):
            if partition in (None, item.meta.partition) and epoch in (None, item.meta.epoch) and self._usable(id):
                seen.add(id)
                yield item.meta
        for meta in super().metas(partition, epoch):
            if meta.id not in seen:
                yield meta

    def delete(self, id: str) -> bool:
        with self._lock:
            waited = self._queued.pop(id, None) is not None
        left = super().delete(id)
        if waited and not left:
            self._listeners.tell([id])
        return waited or left

    def clear(self, partition: str | None = None) -> int:
        with self._lock:
            waiting = [id for id, item in self._queued.items() if partition in (None, item.meta.partition)]
            for id in waiting:
                del self._queued[id]
        removed = super().clear(partition)
        self._listeners.tell(waiting)
        return removed + len(waiting)

    def stats(self, partition: str | None = None) -> StoreStats:
        """Hits are also those of queued chunks; entries and bytes are what is stored."""
        inner, own = super().stats(partition), self._counters.stats(partition, entries=0, bytes=0)
        return replace(inner, hits=inner.hits + own.hits)

    def on_evict(self, listener: Callable[[str], None]) -> None:
        super().on_evict(listener)
        self._listeners.add(listener)

    def flush(self) -> None:
        """Returns when everything submitted before is stored or refused."""
        self._queue.join()
        super().flush()

    def close(self) -> None:
        """Stores what waits, then closes `inner`; later submissions are dropped."""
        with self._lock:
            already, self._closed = self._closed, True
            thread = self._thread
        if not already:
            if thread is not None:
                self._queue.put(None)
                thread.join()
            super().close()

    @property
    def outcomes(self) -> WriterStats:
        """What came of the submissions."""
        return self._outcomes

    def _usable(self, id: str) -> _Queued | None:
        item = self._queued.get(id)
        return item if item is not None and not is_expired(item.meta, now()) else None

    def _waiting(self, id: str) -> Chunk | None:
        """A queued chunk with its state."""
        item = self._usable(id)
        if item is None:
            return None
        try:
            chunk = item.chunk()
        except Exception:  # the writer counts it
            return None
        if chunk is not None:
            self._counters.hit(chunk.meta.partition)
        return chunk

    def _start(self) -> None:
        # A thread does not survive a fork, so check each time whether it is alive.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="dejakv-writer", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._work(item)
            finally:
                # Not kept until the next one: it may keep a prompt's state in memory.
                del item
                self._queue.task_done()
        self._queue.task_done()

    def _work(self, item: _Queued) -> None:
        try:
            outcome = self._store(item)
            left = self._leave(item)
            if outcome == "stored" and left:
                outcome = "dropped"
                self.inner.delete(item.meta.id)  # removed while it was being stored
            self._count(outcome)
            if outcome == "stored" and item.after is not None:
                item.after(self.inner.meta(item.meta.id) or item.meta)
        except Exception:
            self._leave(item)
            self._count("errors")
            logger.exception("a chunk could not be made or stored")
        if self.meta(item.meta.id) is None:
            self._listeners.tell([item.meta.id])

    def _store(self, item: _Queued) -> str:
        """Stores a chunk; the name of its outcome."""
        if self._queued.get(item.meta.id) is not item:
            return "dropped"
        meta = item.meta if item.complete is None else item.complete(item.meta)
        chunk = None if meta is None else item.chunk()
        if meta is None or chunk is None:
            return "empty"
        stored = self.inner.put(Chunk(replace(meta, nbytes=chunk.tensor.nbytes), chunk.tensor))
        return "stored" if stored else "refused"

    def _leave(self, item: _Queued) -> bool:
        """Takes a chunk out of the queue's view. True if it was removed before."""
        with self._lock:
            known = self._queued.get(item.meta.id)
            if known is item:
                del self._queued[item.meta.id]
            return known is None

    def _count(self, name: str) -> None:
        with self._lock:
            self._outcomes = replace(self._outcomes, **{name: getattr(self._outcomes, name) + 1})
