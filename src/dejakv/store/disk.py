"""A store in a folder of this user: chunk files and a catalog, shared by processes, kept over restarts (see `layout`)."""

import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dejakv.errors import StoreError
from dejakv.identity import digest_of
from dejakv.store import catalog as sql
from dejakv.store import files
from dejakv.store.base import Chunk, ChunkMeta, StoreStats
from dejakv.store.catalog import Row
from dejakv.store.codec import CorruptChunk, Encoded, decode, encode
from dejakv.store.counters import Counters, Listeners, logger
from dejakv.store.eviction import Budget, PolicyName, policy_named
from dejakv.store.layout import Layout, open_folder
from dejakv.store.memory import stamped
from dejakv.store.metacodec import decode_meta, encode_meta
from dejakv.store.usage import PendingUses, Pins

_KNOWN_ROWS = 1024
_PENDING_USES = 256


@dataclass(frozen=True)
class _Known:
    row: Row
    meta: ChunkMeta


class DiskStore:
    """Chunks in files. Thread-safe; any number of processes may use one folder, under the same budgets.

    folder                  made with mode 0700; an existing one must be empty or a store
    max_bytes, max_entries  budgets over all processes, 0 for none; an entry larger than the budget is refused
    policy                  `lru` or `lfu`

    Every load is verified. Loaded tensors of a megabyte and more are memory maps, so as with any map an I/O error of the
    disk while one is read kills the process. Uses are noted in batches: a process that is killed forgets the last of them.

    Raises: StoreError if the folder cannot be used.
    """

    def __init__(
        self, folder: str | Path, max_bytes: int = 0, max_entries: int = 0, policy: PolicyName = "lru"
    ) -> None:
        self.folder = Path(folder)
        self._budget = Budget(max_bytes, max_entries)
        self._policy = policy_named(policy)
        self._counters = Counters()
        self._listeners = Listeners()
        self._pins = Pins()
        self._uses = PendingUses()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._lock = threading.Lock()
        self._layout = Layout(self.folder)
        self._catalog, damaged = open_folder(self._layout)
        if damaged:
            self._counters.corrupt()
        self._shrink()

    def put(self, chunk: Chunk) -> bool:
        meta = stamped(chunk.meta, chunk.tensor)
        try:
            encoded, blob = encode(meta.id, chunk.tensor), encode_meta(meta)
            if self._budget.excess_bytes(encoded.nbytes + len(blob)):
                return self._refuse(meta.partition, "too_large")
            name = files.new_name(digest_of(meta.id)[:32])
            temporary = self._layout.temporary / name.replace("/", "-")
            with files.written(temporary, (encoded.header, encoded.data)):
                return self._commit(meta, blob, encoded, name, temporary)
        except (StoreError, UnicodeError) as error:
            logger.warning("a chunk cannot be stored: %s", error)
            return self._refuse(meta.partition, "invalid")
        except OSError as error:
            return self._refuse(meta.partition, files.reason_of(error))
        except sqlite3.Error as error:
            return self._refuse(meta.partition, sql.reason_of(error))

    def get(self, id: str) -> Chunk | None:
        for _ in range(2):
            known = self._lookup(id)
            if known is None:
                break
            try:
                chunk = self._load(known)
            except FileNotFoundError:
                # Another process has replaced the chunk since its row was read here: look once more.
                with self._lock:
                    self._known.pop(id, None)
                continue
            except CorruptChunk as error:
                self._discard(known.row, error)
                break
            except OSError as error:
                logger.warning("chunk %s cannot be read: %s", id, error)
                break
            self._counters.hit(known.row.partition)
            self.touch(id)
            return chunk
        else:
            known = self._lookup(id)
            if known is not None:
                self._discard(known.row, CorruptChunk("the file is missing"))
        self._counters.miss(known.row.partition if known else None)
        return None

    def meta(self, id: str) -> ChunkMeta | None:
        known = self._lookup(id)
        return known.meta if known else None

    def metas(self, partition: str | None = None, epoch: str | None = None) -> Iterator[ChunkMeta]:
        try:
            for row in self._catalog.rows(partition, epoch):
                known = self._decoded(row)
                if known is not None:
                    yield known.meta
        except sqlite3.Error as error:
            logger.warning("the catalog of %s cannot be read: %s", self.folder, error)

    def delete(self, id: str) -> bool:
        try:
            return bool(self._take_out([id]))
        except sqlite3.Error as error:
            logger.warning("chunk %s cannot be deleted: %s", id, error)
            return False

    def clear(self, partition: str | None = None) -> int:
        """Also removes what was set aside. Raises: StoreError if the catalog cannot be written; nothing is removed then."""
        try:
            removed = len(self._take_out([row.id for row in self._catalog.rows(partition, None)]))
        except sqlite3.Error as error:
            raise StoreError(f"the store in {self.folder} cannot be cleared ({error}): check its rights") from error
        files.empty_quarantine(self._layout.quarantine, None if partition is None else _owner(partition))
        return removed

    def stats(self, partition: str | None = None) -> StoreStats:
        try:
            entries, held = self._catalog.totals(partition)
        except sqlite3.Error:
            entries, held = 0, 0
        return self._counters.stats(partition, entries=entries, bytes=held)

    def touch(self, id: str) -> None:
        """Notes a use, here or by a tier in front."""
        if self._uses.add(id) >= _PENDING_USES:
            self.flush()

    def pin(self, id: str) -> bool:
        """Keeps an entry from being evicted by this process until `unpin`; pins count. False if the entry is unknown."""
        if self._lookup(id) is None:
            return False
        self._pins.add(id)
        return True

    def unpin(self, id: str) -> None:
        self._pins.remove(id)

    def on_evict(self, listener: Callable[[str], None]) -> None:
        """Also told of what other processes have taken out, when this one next looks into the catalog."""
        self._listeners.add(listener)

    def flush(self) -> None:
        """Notes the uses that are still pending."""
        uses = self._uses.take()
        try:
            with self._catalog.transaction() as connection:
                _note(connection, uses)
        except sqlite3.Error as error:
            logger.warning("uses cannot be noted in %s: %s", self.folder, error)

    def close(self) -> None:
        self.flush()
        self._catalog.close()

    def _commit(self, meta: ChunkMeta, blob: bytes, encoded: Encoded, name: str, temporary: Path) -> bool:
        size = encoded.nbytes + len(blob)
        row = Row(meta.id, meta.partition, meta.epoch, blob, name, encoded.nbytes, encoded.checksum, size)
        final, uses = self._layout.chunks / name, self._uses.take()
        try:
            with self._catalog.transaction() as connection:
                _note(connection, uses)
                protected = self._pins.held()
                victims, reason = sql.make_room(
                    connection, self._policy, self._budget, protected, id=meta.id, nbytes=size
                )
                if victims is None:
                    return self._refuse(meta.partition, "pinned")
                gone = sql.delete(connection, [*victims, meta.id])
                files.publish(temporary, final)
                sql.insert(connection, row)
        except BaseException:
            files.remove(final)
            raise
        for removed in gone:
            if removed.id != meta.id:
                self._counters.evicted(removed.partition, reason)
        self._counters.put(meta.partition)
        self._finish(gone, kept=meta.id)
        return True

    def _shrink(self) -> None:
        """Meets a budget smaller than what the folder held."""
        try:
            with self._catalog.transaction() as connection:
                victims, reason = sql.make_room(connection, self._policy, self._budget)
                gone = sql.delete(connection, victims or ())
        except sqlite3.Error as error:
            logger.warning("the budget of %s is not met yet: %s", self.folder, error)
            return
        for removed in gone:
            self._counters.evicted(removed.partition, reason)
        self._finish(gone)

    def _take_out(self, ids: list[str]) -> list[sql.Removed]:
        with self._catalog.transaction() as connection:
            gone = sql.delete(connection, ids)
        self._finish(gone)
        return gone

    def _finish(self, gone: list[sql.Removed], kept: str | None = None) -> None:
        """Forgets and unlinks what was taken out, and tells the listeners; `kept` was only replaced."""
        with self._lock:
            for removed in gone:
                self._known.pop(removed.id, None)
                self._uses.discard(removed.id)
        for removed in gone:
            files.remove(self._layout.chunks / removed.file)
        self._listeners.tell(removed.id for removed in gone if removed.id != kept)

    def _discard(self, row: Row, cause: CorruptChunk) -> None:
        """Takes a damaged chunk out and sets its file aside, unless it has been replaced meanwhile."""
        logger.warning("a damaged chunk is set aside: %s", cause)
        self._counters.corrupt(row.partition)
        try:
            with self._catalog.transaction() as connection:
                gone = sql.delete(connection, [row.id], row.file)
            files.set_aside(self._layout.chunks / row.file, self._layout.quarantine, _owner(row.partition))
            self._finish(gone)
        except sqlite3.Error as error:
            logger.warning("the damaged chunk %s cannot be taken out: %s", row.id, error)

    def _lookup(self, id: str) -> _Known | None:
        try:
            gone = self._catalog.removed_elsewhere()
            with self._lock:
                if gone:
                    self._known.clear()
                known = self._known.get(id)
            self._listeners.tell(gone)
            if known is None:
                row = self._catalog.row(id)
                known = self._decoded(row) if row else None
                if known is not None:
                    self._remember(known)
        except (sqlite3.Error, UnicodeError) as error:
            logger.warning("the catalog of %s cannot be read: %s", self.folder, error)
            return None
        return known

    def _decoded(self, row: Row) -> _Known | None:
        try:
            meta = decode_meta(row.meta)
            if (meta.id, meta.partition, meta.epoch) != (row.id, row.partition, row.epoch):
                raise CorruptChunk(f"chunk {row.id}: its row describes another one")
        except CorruptChunk as error:
            self._discard(row, error)
            return None
        return _Known(row, meta)

    def _remember(self, known: _Known) -> None:
        with self._lock:
            self._known[known.row.id] = known
            if len(self._known) > _KNOWN_ROWS:
                self._known.popitem(last=False)

    def _load(self, known: _Known) -> Chunk:
        buffer = files.read_file(self._layout.chunks / known.row.file)
        if buffer.size != known.row.file_bytes:
            raise CorruptChunk(f"chunk {known.row.id}: {buffer.size} bytes in place of {known.row.file_bytes}")
        return Chunk(known.meta, decode(known.row.id, buffer, known.row.checksum))

    def _refuse(self, partition: str, reason: str) -> bool:
        self._counters.refused(partition, reason)
        return False


def _note(connection: sqlite3.Connection, uses: dict[str, int]) -> None:
    for id, hits in uses.items():
        sql.touch(connection, id, hits)


def _owner(partition: str) -> str:
    """The mark of a partition on files that are set aside, so that `clear` finds them."""
    return digest_of(partition)[:16]
