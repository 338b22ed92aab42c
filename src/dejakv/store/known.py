"""A process's copy of catalog rows: the latest ones, decoded, until another process removes some."""

import sqlite3
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cachetools import FIFOCache

from dejakv.store.base import NODE, ChunkMeta
from dejakv.store.catalog import Catalog
from dejakv.store.catalog_rows import Row, Unreadable
from dejakv.store.codec import CorruptChunk
from dejakv.store.counters import Listeners, logger
from dejakv.store.metacodec import decode_meta

_ROWS = 1024

Mark = tuple[int, str] | None
"""Number and file of the newest row that was seen."""


@dataclass(frozen=True)
class Known:
    row: Row
    meta: ChunkMeta


class KnownRows:
    """Finds rows by id. Thread-safe; never waits for a writer.

    listeners  called for entries removed by other processes
    damaged    called with a damaged row
    """

    def __init__(
        self, catalog: Catalog, listeners: Listeners, damaged: Callable[[Row | Unreadable, CorruptChunk], None]
    ) -> None:
        self._catalog = catalog
        self._listeners = listeners
        self._damaged = damaged
        self._rows: FIFOCache[str, Known] = FIFOCache(_ROWS)
        self._changes = 0
        self._lock = threading.Lock()

    def find(self, id: str) -> Known | None:
        """The row of an id; None if there is none, it is damaged or the catalog cannot be read."""
        try:
            self._notice()
            with self._lock:
                known, changes = self._rows.get(id), self._changes
            if known is None:
                row = self._catalog.row(id)
                known = self.decoded(row) if row else None
                if known is not None:
                    self._remember(known, changes)
        except (sqlite3.Error, UnicodeError) as error:
            logger.warning("the catalog cannot be read: %s", error)
            return None
        return known

    def decoded(self, row: Row | Unreadable) -> Known | None:
        """The row with its description, or None if it is damaged."""
        try:
            if isinstance(row, Unreadable):
                raise CorruptChunk(f"row {row.number} of the catalog is damaged")
            meta = decode_meta(row.meta)
            described = (meta.id, meta.partition, meta.epoch, meta.parent, meta.kind == NODE)
            if described != (row.id, row.partition, row.epoch, row.parent, row.node == 1):
                raise CorruptChunk(f"chunk {row.id}: its row describes another one")
        except CorruptChunk as error:
            self._damaged(row, error)
            return None
        return Known(row, meta)

    def added(self, mark: Mark) -> tuple[list[ChunkMeta], Mark]:
        """See `TellsNew`. A mark is the newest row's number and file.

        New rows get higher numbers while the row of the mark is there. Once it is gone its number may be given again, so all rows
        are read.
        """
        number, file = mark or (0, "")
        try:
            after = number if self._catalog.file_of(number) == file else 0
            rows = list(self._catalog.rows(None, None, after=after))
        except sqlite3.Error as error:
            logger.warning("the catalog cannot be read: %s", error)
            return [], mark
        if rows:
            last = rows[-1]
            mark = (last.number, last.file) if isinstance(last, Row) else None
        elif not after:
            mark = None
        return [known.meta for known in map(self.decoded, rows) if known is not None], mark

    def notice(self) -> bool:
        """Tells the listeners of entries removed by other processes. False if not all of them are still known by name."""
        try:
            return self._notice()
        except sqlite3.Error as error:
            logger.warning("the catalog cannot be read: %s", error)
            return True

    def forget(self, ids: Iterable[str]) -> None:
        with self._lock:
            for id in ids:
                self._rows.pop(id, None)
                self._changes += 1

    def _notice(self) -> bool:
        removed = self._catalog.removed_elsewhere()
        self.forget(removed.changed)
        if removed.ids or not removed.complete:
            with self._lock:
                self._rows.clear()
                self._changes += 1
        self._listeners.tell(removed.ids)
        return removed.complete

    def _remember(self, known: Known, changes: int) -> None:
        """`changes`: how many there were before the row was read. After another one it may be gone, or be another row by now."""
        with self._lock:
            if changes != self._changes:
                return
            self._rows[known.row.id] = known
