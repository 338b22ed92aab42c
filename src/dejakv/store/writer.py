"""Storing in the background: a thread makes and stores chunks, and a full queue drops new ones rather than waiting."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from dejakv.store.base import Chunk, ChunkMeta, Store
from dejakv.store.counters import logger

Make = Callable[[], Chunk | None]
After = Callable[[ChunkMeta], object]


@dataclass(frozen=True)
class WriterStats:
    """Outcomes of submissions. `empty`: `make` returned nothing; `refused`: by the store; `dropped`: the queue was full or
    the writer closed; `errors`: `make` or `after` raised."""

    submitted: int = 0
    stored: int = 0
    empty: int = 0
    refused: int = 0
    dropped: int = 0
    errors: int = 0


class Writer:
    """Stores chunks in `store`, one after another, in its own thread.

    background  False: `submit` does the work before it returns (tests, scripts)
    max_queue   largest number of waiting items; it is small, because each may keep a prompt's state in memory
    """

    def __init__(self, store: Store, *, background: bool = True, max_queue: int = 32) -> None:
        self._store = store
        self._background = background
        self._queue: queue.Queue[tuple[Make, After | None] | None] = queue.Queue(max_queue)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._stats = WriterStats()

    def submit(self, make: Make, after: After | None = None) -> bool:
        """Submits the making of a chunk; `after` is called with the meta of a stored chunk.

        Never blocks on the store and never raises. False if it was dropped (`stats().dropped`).
        """
        with self._lock:
            accepted = not self._closed
            if accepted and self._background:
                try:
                    self._queue.put_nowait((make, after))
                    self._start()
                except queue.Full:
                    accepted = False
        self._count("submitted")
        if not accepted:
            self._count("dropped")
        elif not self._background:
            self._work(make, after)
        return accepted

    def flush(self) -> None:
        """Returns when everything submitted before is stored or refused."""
        self._queue.join()

    def close(self) -> None:
        """Finishes waiting items and ends the thread; later submissions are dropped."""
        with self._lock:
            already, self._closed = self._closed, True
            thread = self._thread
        if not already and thread is not None:
            self._queue.put(None)
            thread.join()

    def stats(self) -> WriterStats:
        return self._stats

    def _start(self) -> None:
        # A thread does not survive a fork, so check each time whether it is alive.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="dejakv-writer", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._work(*item)
            finally:
                # Not kept until the next one: it may keep a prompt's state in memory.
                del item
                self._queue.task_done()
        self._queue.task_done()

    def _work(self, make: Make, after: After | None) -> None:
        try:
            chunk = make()
            if chunk is None:
                self._count("empty")
            elif self._store.put(chunk):
                self._count("stored")
                if after is not None:
                    after(self._store.meta(chunk.meta.id) or chunk.meta)
            else:
                self._count("refused")
        except Exception:
            self._count("errors")
            logger.exception("a chunk could not be made or stored")

    def _count(self, name: str) -> None:
        with self._lock:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + 1})
