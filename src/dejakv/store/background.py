"""The background thread of a store: it stores what is handed over, and looks after entries whose time is over."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace

from dejakv.store.base import ChunkMeta, StoredState, Tensor
from dejakv.store.counters import logger
from dejakv.store.forks import call_in_child, fork_safe_lock

Capture = Callable[[], Tensor | None]
Complete = Callable[[ChunkMeta], ChunkMeta | None]
After = Callable[[ChunkMeta], object]

LONGEST_WAIT = 60.0
"""Most seconds between two looks at the clock, which may have been set forward."""


@dataclass(frozen=True)
class WriterStats:
    """Outcomes of submissions. `empty`: there was no state; `refused`: by the store; `dropped`: the queue was full, the store
    closed, or the chunk was removed before it was stored; `errors`: a callback or the store raised."""

    submitted: int = 0
    stored: int = 0
    empty: int = 0
    refused: int = 0
    dropped: int = 0
    errors: int = 0


class QueuedState:
    """A chunk that waits to be stored. Its state is copied once, by who needs it first: the worker or a reader."""

    def __init__(self, meta: ChunkMeta, capture: Capture, complete: Complete | None, after: After | None) -> None:
        self.meta = meta
        self.complete = complete
        self.after = after
        self._captures = [capture]
        self._state: Future[Tensor | None] = Future()

    def chunk(self) -> StoredState | None:
        """Capture the state once and return its chunk, None without a state. Raises the errors of `capture`."""
        try:
            # `pop` is atomic: of a worker and a reader that come together, one alone captures.
            capture = self._captures.pop()
        except IndexError:  # another thread has it
            pass
        else:
            try:
                self._state.set_result(capture())
            except BaseException as error:
                # Who else waits for this state must get the error too, and not wait for ever.
                self._state.set_exception(error)
        tensor = self._state.result()
        return None if tensor is None else StoredState(replace(self.meta, nbytes=tensor.nbytes), tensor)


class BackgroundWorker:
    """Runs `work` for each item, one after another, and `tick` when nothing waits and its time has come. Thread-safe.

    work   stores an item, calls `leave` and then `count`
    tick   returns after how many seconds it wants to be called again, None: not before `wake`
    max_queued   items that may wait
    """

    def __init__(
        self, work: Callable[[QueuedState], object], tick: Callable[[], float | None], max_queued: int
    ) -> None:
        self.outcomes = WriterStats()
        self._work = work
        self._tick = tick
        self._queue: queue.Queue[QueuedState | Callable[[], object] | None] = queue.Queue(max_queued)
        self.queued: dict[str, QueuedState] = {}
        """Entries not stored yet, by id, the oldest first. Read it without the lock."""
        self._thread: threading.Thread | None = None
        self._lock = fork_safe_lock()
        self._closed = False
        call_in_child(self._begin_anew)

    def _begin_anew(self) -> None:
        """In a child of `fork`: the parent's thread stores what waited there, and the child's queue is its own."""
        self._queue = queue.Queue(self._queue.maxsize)
        self.queued = {}
        self._thread = None

    def submit(self, item: QueuedState, background: bool) -> bool:
        """Queue an item; never waits. False if the queue is full or closed. `background=False`: process it before returning."""
        id = item.meta.id
        with self._lock:
            # A reader must find the newest state of an id, so a refused item gives the older one back.
            accepted, before = not self._closed, self.queued.get(id)
            if accepted:
                self.queued[id] = item
            if accepted and background:
                try:
                    self._queue.put_nowait(item)
                    self._start()
                except queue.Full:
                    accepted = False
                    del self.queued[id]
                    if before is not None:
                        self.queued[id] = before

        self.count("submitted")
        if not accepted:
            self.count("dropped")
        elif not background:
            self._work(item)
        return accepted

    def drop(self, id: str) -> bool:
        """Take back an item not stored yet; False without one."""
        with self._lock:
            return self.queued.pop(id, None) is not None

    def leave(self, item: QueuedState) -> bool:
        """Remove an item from the queue. True if it was dropped before."""
        with self._lock:
            queued_item = self.queued.get(item.meta.id)
            if queued_item is item:
                del self.queued[item.meta.id]
            return queued_item is None

    def count(self, outcome: str) -> None:
        with self._lock:
            self.outcomes = replace(self.outcomes, **{outcome: getattr(self.outcomes, outcome) + 1})

    def wake(self) -> None:
        """Has `tick` called soon."""
        with self._lock:
            if not self._closed:
                self._start()
                with suppress(queue.Full):  # it comes after an item
                    self._queue.put_nowait(lambda: None)

    def flush(self) -> None:
        """Returns when everything submitted before is done."""
        self._queue.join()

    def close(self) -> None:
        """Does what waits and ends."""
        with self._lock:
            closed, self._closed = self._closed, True
            thread = self._thread
        # A callback of the worker may close the store: a thread cannot join itself.
        if not closed and thread is not None and thread.is_alive() and thread is not threading.current_thread():
            self._queue.put(None)
            thread.join()

    def _start(self) -> None:
        # A thread does not survive a fork, so check each time whether it is alive.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="dejakv-store", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        wait: float | None = None
        while True:
            # `None` is the order to end, so it cannot also mean that nothing came.
            dequeued = True
            item: QueuedState | Callable[[], object] | None = None
            try:
                item = self._queue.get(timeout=None if wait is None else min(max(0.0, wait), LONGEST_WAIT))
            except queue.Empty:
                dequeued = False
            try:
                if dequeued and item is None:
                    return
                if isinstance(item, QueuedState):
                    self._work(item)
                wait = self._tick()
            except Exception:  # nobody waits for it, and the next may succeed
                wait = LONGEST_WAIT
                logger.exception("work in the background of a store failed")
            finally:
                # Not kept until the next one: it may keep a prompt's state in memory.
                del item
                if dequeued:
                    self._queue.task_done()
