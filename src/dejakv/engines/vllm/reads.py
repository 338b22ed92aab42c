"""Reads of stored states that several loads want at once: one read serves them all."""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from dejakv.store.base import Chunk, Rows
from dejakv.store.store import Store

Parts = Sequence[Chunk]
"""Chunks that hold some of a state's rows each, first rows first."""


@dataclass(frozen=True)
class _Read:
    """A read under way. `rows`: those that are read; None: all, in one chunk."""

    rows: Rows | None
    parts: "Future[Parts | None]" = field(default_factory=lambda: Future[Parts | None]())

    def has(self, rows: Rows | None) -> bool:
        """Whether it reads all of these rows."""
        if self.rows is None or rows is None:
            return self.rows is None
        return all(any(begin <= start and stop <= end for begin, end in self.rows) for start, stop in rows)


class Reads:
    """Thread-safe. What others expect too is held until they have read it; nothing else is."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._expected: Counter[str] = Counter()
        self._reads: dict[str, _Read] = {}
        self._lock = threading.Lock()

    def expect(self, ids: Iterable[str]) -> None:
        """Notes that these are going to be read, each once."""
        with self._lock:
            self._expected.update(ids)

    def read(self, id: str, rows: Rows | None = None) -> Parts | None:
        """What holds the rows, from a read that another thread began if one has them. Raises what the store raises.

        rows  those that are needed, None for all in one chunk
        """
        with self._lock:
            read = self._reads.get(id)
            mine = read is None or not read.has(rows)
            if read is None or mine:
                read = _Read(rows)
                if self._expected[id] > 0:
                    self._reads[id] = read
        if mine:
            try:
                read.parts.set_result(self._whole(id) if rows is None else self._store.get_parts(id, rows))
            except Exception as error:
                read.parts.set_exception(error)
            with self._lock:
                if self._expected[id] <= 1:
                    self._reads.pop(id, None)
        return read.parts.result()

    def _whole(self, id: str) -> Parts | None:
        chunk = self._store.get(id)
        return None if chunk is None else (chunk,)

    def done(self, ids: Iterable[str]) -> None:
        """Takes `expect` back: they were read, or nobody wants them any more."""
        with self._lock:
            for id in ids:
                self._expected[id] -= 1
                if self._expected[id] <= 0:
                    del self._expected[id]
                    self._reads.pop(id, None)
