"""What reading leaves to be written: uses, and damage that it met."""

import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence

from dejakv.store import changes
from dejakv.store.base import ChunkMeta, CorruptChunk
from dejakv.store.catalog import Catalog
from dejakv.store.changes import Gone, Uses
from dejakv.store.counters import Counters, logger
from dejakv.store.records import decode_meta

_MOST_USES = 256


class Notes:
    """Noted in batches, so that reading waits for no writer: a killed process loses the last ones. Thread-safe.

    left  called with what has left, after the commit
    """

    def __init__(
        self, catalog: Catalog, counters: Counters, left: Callable[[Gone], object], lock: threading.Lock
    ) -> None:
        self._catalog = catalog
        self._counters = counters
        self._left = left
        self._lock = lock
        self._uses = Uses()
        self._condemned: dict[int, str] = {}
        self._lost: set[str] = set()

    def used(self, id: str, segments: Sequence[int]) -> None:
        """Notes a use of a record and of the segments that it consists of."""
        with self._lock:
            use = (id, tuple(segments))
            # A dictionary keeps the order of insertion: that of the last uses.
            self._uses[use] = self._uses.pop(use, 0) + 1
            full = len(self._uses) >= _MOST_USES
        if full:
            self.settle(wait=False)

    def take_uses(self) -> Uses:
        """The uses, for a transaction that notes them."""
        with self._lock:
            uses, self._uses = self._uses, {}
        return uses

    def put_back(self, uses: Uses) -> None:
        """Keeps uses whose transaction failed."""
        with self._lock:
            newer, self._uses = self._uses, uses
            for use, count in newer.items():
                self._uses[use] = self._uses.pop(use, 0) + count

    def damaged(self, segment: int, why: str, partition: str | None = None) -> None:
        """Removes a damaged segment, now or when nobody else writes."""
        self._condemn(segment, "segment", why, partition)
        self.settle(wait=False)

    def missing(self, segment: int) -> None:
        """The same for one without an object. It is counted when its row is found to be there still: another may just be removing
        both."""
        with self._lock:
            self._condemned.setdefault(segment, "")
        self.settle(wait=False)

    def decoded(self, record: int, about: bytes) -> ChunkMeta | None:
        """A description; None for a damaged one, which is removed with the next notes."""
        try:
            return decode_meta(about)
        except CorruptChunk as error:
            self._condemn(-record, "description", str(error))
            return None

    def lose(self, id: str, segments: Iterable[int]) -> None:
        """Counts a record as lost that needs a condemned segment: what replaces it takes its id out again."""
        with self._lock:
            if any(segment in self._condemned for segment in segments):
                self._lost.add(id)

    def is_lost(self, id: str) -> bool:
        return id in self._lost

    def found(self, id: str) -> None:
        with self._lock:
            self._lost.discard(id)

    def settle(self, *, wait: bool) -> None:
        """Writes what is noted. Without `wait` only if nobody else writes."""
        uses, condemned = self.take_uses(), dict(self._condemned)
        if not uses and not condemned:
            return
        try:
            with self._catalog.transaction(wait=wait) as sql:
                changes.touch(sql, uses)
                missing = [n for n, why in condemned.items() if not why and changes.is_there(sql, n)]
                gone = changes.remove(sql, [-n for n in condemned if n < 0])
                gone += changes.evict(sql, [n for n in condemned if n > 0])
        except sqlite3.Error as error:
            self.put_back(uses)
            if wait:
                logger.warning("uses and damage cannot be noted: %s", error)
            return
        with self._lock:
            for n in condemned:
                self._condemned.pop(n, None)
            if not self._condemned:
                self._lost.clear()
        for _ in missing:
            logger.warning("a segment is removed: its object is missing")
            self._counters.add("corrupt")
        self._left(gone)

    def _condemn(self, number: int, what: str, why: str, partition: str | None = None) -> None:
        with self._lock:
            known = number in self._condemned
            self._condemned[number] = why
        if not known:
            logger.warning("a damaged %s is removed: %s", what, why)
            self._counters.add("corrupt", partition)
