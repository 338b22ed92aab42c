"""Reads of stored states that several loads want at once: one read serves them all."""

import threading
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future

from dejakv.store.base import Chunk, Store


class Reads:
    """Thread-safe. What others expect too is held until they have read it; nothing else is."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._expected: Counter[str] = Counter()
        self._reads: dict[str, Future[Chunk | None]] = {}
        self._lock = threading.Lock()

    def expect(self, ids: Iterable[str]) -> None:
        """Notes that these are going to be read, each once."""
        with self._lock:
            self._expected.update(ids)

    def read(self, id: str) -> Chunk | None:
        """The chunk, from a read that another thread began if there is one. Raises what the store raises."""
        with self._lock:
            read = self._reads.get(id)
            mine = read is None
            if read is None:
                read = Future()
                if self._expected[id] > 0:
                    self._reads[id] = read
        if mine:
            try:
                read.set_result(self._store.get(id))
            except Exception as error:
                read.set_exception(error)
            with self._lock:
                if self._expected[id] <= 1:
                    self._reads.pop(id, None)
        return read.result()

    def done(self, ids: Iterable[str]) -> None:
        """Takes `expect` back: they were read, or nobody wants them any more."""
        with self._lock:
            for id in ids:
                self._expected[id] -= 1
                if self._expected[id] <= 0:
                    del self._expected[id]
                    self._reads.pop(id, None)
