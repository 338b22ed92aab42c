"""The background thread of a store: it stores queued states and removes expired entries."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from dejakv.store.base import RawTensor, StateInfo, StoredState, WriterStats
from dejakv.store.counters import logger
from dejakv.store.forks import call_in_child, fork_safe_lock

Capture = Callable[[], RawTensor | None]
"""Copies a state, and returns None if there is none."""
Complete = Callable[[StateInfo], StateInfo | None]
"""Finishes a description before storage, and returns None to cancel it."""
After = Callable[[StateInfo], object]
"""Is called with the description after storage."""

LONGEST_WAIT = 60.0
"""Most seconds of a pause of `tick`, since the clock may be set forward; also after an error."""


class QueuedState:
    """A state that waits to be stored. The worker or an earlier reader captures it, once."""

    def __init__(
        self, meta: StateInfo, capture: Capture, complete: Complete | None, after: After | None
    ) -> None:
        self.meta = meta
        self.complete = complete
        self.after = after
        self._captures = [capture]
        self._state: Future[RawTensor | None] = Future()

    def capture_once(self) -> StoredState | None:
        """Capture the state on the first call, and return it with its description.

        Every caller gets the same state.

        Returns
        -------
        StoredState | None
            None if there is no state.

        Raises
        ------
        BaseException
            The error of `capture`, in every caller.
        """
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
        return (
            None
            if tensor is None
            else StoredState(replace(self.meta, nbytes=tensor.nbytes), tensor)
        )


class BackgroundWorker:
    """A thread that processes queued states one after another, and calls `tick` after each.

    Thread-safe.

    Parameters
    ----------
    work : Callable[[QueuedState], object]
        Stores an item, then calls `dequeue` and `count`.
    tick : Callable[[], float | None]
        Called after each item, and when its pause is over. Returns the pause in seconds, of which
        at most `LONGEST_WAIT` pass; None: until the next item or `wake`.
    max_queued : int
        Items that may wait.
    """

    def __init__(
        self,
        work: Callable[[QueuedState], object],
        tick: Callable[[], float | None],
        max_queued: int,
    ) -> None:
        self.outcomes = WriterStats()
        self._work = work
        self._tick = tick
        self._queue: queue.Queue[QueuedState | Callable[[], object] | None] = queue.Queue(
            max_queued
        )
        self.queued: dict[str, QueuedState] = {}
        """Entries not stored yet, by id, the oldest first; readers need no lock."""
        self._thread: threading.Thread | None = None
        self._lock = fork_safe_lock()
        self._closed = False
        call_in_child(self._begin_anew)

    def _begin_anew(self) -> None:
        """Start with an empty queue in a child of `fork`: the parent stores what waited there."""
        self._queue = queue.Queue(self._queue.maxsize)
        self.queued = {}
        self._thread = None

    def submit(self, item: QueuedState, background: bool) -> bool:
        """Queue an item without waiting for room, or process it at once.

        A queued item of the same id is replaced.

        Parameters
        ----------
        item : QueuedState
            State to store.
        background : bool
            False: process the item before returning.

        Returns
        -------
        bool
            False if the queue is full or closed.
        """
        id = item.meta.id
        with self._lock:
            # A reader must find the newest state of an id, so a refused item gives the older one
            # back.
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
        """Take back an item that is not stored yet; False if there is none."""
        with self._lock:
            return self.queued.pop(id, None) is not None

    def dequeue(self, item: QueuedState) -> bool:
        """Remove an item from the queue; True if it was dropped before."""
        with self._lock:
            queued_item = self.queued.get(item.meta.id)
            # A newer item of the same id may have taken its place, and stays.
            if queued_item is item:
                del self.queued[item.meta.id]
            return queued_item is None

    def count(self, outcome: str) -> None:
        """Count one more of an outcome, by its name in `WriterStats`."""
        with self._lock:
            self.outcomes = replace(self.outcomes, **{outcome: getattr(self.outcomes, outcome) + 1})

    def wake(self) -> None:
        """Have `tick` called soon."""
        with self._lock:
            if not self._closed:
                self._start()
                # With a full queue `tick` is called anyway, after one of its items.
                with suppress(queue.Full):
                    self._queue.put_nowait(lambda: None)

    def flush(self) -> None:
        """Wait until everything submitted before is done."""
        self._queue.join()

    def close(self) -> None:
        """Process the waiting items and end the thread; later items are refused.

        A call from the thread itself (by a callback) only refuses later items.
        """
        with self._lock:
            closed, self._closed = self._closed, True
            thread = self._thread

        # A callback of the worker may close the store: a thread cannot join itself.
        if (
            not closed
            and thread is not None
            and thread.is_alive()
            and thread is not threading.current_thread()
        ):
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
                item = self._queue.get(
                    timeout=None if wait is None else min(max(0.0, wait), LONGEST_WAIT)
                )
            except queue.Empty:
                dequeued = False

            try:
                if dequeued and item is None:
                    return
                if isinstance(item, QueuedState):
                    self._work(item)
                wait = self._tick()
            # Nobody waits for this item, and the next one may succeed.
            except Exception:
                wait = LONGEST_WAIT
                logger.exception("work in the background of a store failed")
            finally:
                # Not kept until the next one: it may keep a prompt's state in memory.
                del item
                if dequeued:
                    self._queue.task_done()
