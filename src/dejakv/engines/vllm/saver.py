"""Saves, off the engine loop: a bounded queue and one thread that hands chunks to the store."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from dejakv.store.base import Chunk
from dejakv.store.store import Store

log = logging.getLogger("dejakv.vllm")

BACKLOG = "backlog: the store is slower than the prompts"

Make = Callable[[], AbstractContextManager[Chunk]]
"""Makes the chunk; its memory may be used for something else when the context ends."""


class Saver:
    """Takes copies of KV and stores them one after the other. What does not fit the queue is dropped, with the reason.

    max_pending_bytes  copies that wait; more would only pile up in memory behind a slow store. A larger one is taken where none
                       waits: no other time is better. The scheduler's side orders prompts that are larger in parts (`long_saves`)
    """

    def __init__(self, store: Store, max_pending_bytes: int) -> None:
        self._store = store
        self._limit = max_pending_bytes
        self._queue: deque[tuple[str, int, Make]] = deque()
        self._pending = 0
        self._stored: list[str] = []
        self._dropped: dict[str, str] = {}
        self._ready = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="dejakv-save", daemon=True)
        self._thread.start()

    def has_room(self, chunk_id: str, nbytes: int) -> bool:
        """Whether a copy of this size may be made; if not, it is reported as dropped."""
        with self._ready:
            if not self._closing and (not self._pending or self._pending + nbytes <= self._limit):
                return True
            self._dropped[chunk_id] = BACKLOG
            return False

    def drop(self, chunk_id: str, why: str) -> None:
        """Reports a save that is not even copied."""
        with self._ready:
            self._dropped[chunk_id] = why

    def submit(self, chunk_id: str, nbytes: int, make: Make) -> None:
        """Stores a chunk, or some rows of one, that is made then."""
        with self._ready:
            self._queue.append((chunk_id, nbytes, make))
            self._pending += nbytes
            self._ready.notify_all()

    def take(self) -> tuple[list[str], dict[str, str]]:
        """Ids that are in the store and ids that were dropped with the reason, since the last call."""
        with self._ready:
            stored, self._stored = self._stored, []
            dropped, self._dropped = self._dropped, {}
        return stored, dropped

    def wait_for_one(self, timeout: float) -> None:
        """Waits until one of those that are pending is stored, at most so many seconds."""
        with self._ready:
            before = self._pending
            self._ready.wait_for(lambda: not self._pending or self._pending < before, timeout)

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until nothing is pending; False if that took longer than `timeout` seconds."""
        with self._ready:
            return self._ready.wait_for(lambda: self._pending == 0, timeout)

    def close(self, timeout: float = 30.0) -> None:
        """Stores what is pending, for at most `timeout` seconds."""
        self.flush(timeout)
        with self._ready:
            self._closing = True
            self._ready.notify_all()
        self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                chunk_id, nbytes, make = self._queue.popleft()
            try:
                with make() as chunk:
                    why = "" if self._store.put(chunk) else "refused: the store did not take it"
            except Exception as error:  # whatever is wrong with a store, it costs this save and nothing else
                why = f"error: {type(error).__name__}: {error}"
                log.warning("the state of a prompt was not stored: %s", why)
            with self._ready:
                self._pending -= nbytes
                if why:
                    self._dropped[chunk_id] = why
                else:
                    self._stored.append(chunk_id)
                self._ready.notify_all()
