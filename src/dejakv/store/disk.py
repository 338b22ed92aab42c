"""A store in a folder of this user: chunk files and a catalog, shared by processes, kept across restarts (see `names`)."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from dejakv.errors import StoreError
from dejakv.store import catalog as sql
from dejakv.store import files, leftovers, names
from dejakv.store.base import Chunk, ChunkMeta, StoreStats
from dejakv.store.catalog_rows import (
    Removed,
    Row,
    Unreadable,
    delete,
    delete_damaged,
    insert,
    make_room,
    note,
    numbers_in,
    numbers_of,
)
from dejakv.store.codec import CorruptChunk, Encoded, decode, encode
from dejakv.store.connection import is_damage
from dejakv.store.counters import Counters, Listeners, logger
from dejakv.store.eviction import Budget, PolicyName, policy_named
from dejakv.store.known import Known, KnownRows, Mark
from dejakv.store.layout import open_folder
from dejakv.store.memory import stamped
from dejakv.store.metacodec import encode_meta
from dejakv.store.usage import Condemned, PendingUses, Pins

_PENDING_USES = 256


class DiskStore:
    """Chunks in files. Thread-safe; any number of processes may use one folder, under the same budgets.

    folder                  created with mode 0700; an existing one must be empty or a store
    max_bytes, max_entries  budgets for all processes together, 0 for none; an entry larger than the budget is refused
    policy                  `lru` or `lfu`

    Every load is verified. Loaded tensors of a megabyte and more are memory maps: an I/O error of the disk during a read kills
    the process. Uses are noted in batches: a killed process loses the last ones. Reading never waits for a writer.
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
        self._condemned = Condemned()
        self._layout, self._catalog, damaged = open_folder(self.folder)
        self._known = KnownRows(self._catalog, self._listeners, self._discard)
        self._closed = False
        for _ in range(damaged):
            self._counters.corrupt()
        self._shrink()

    def put(self, chunk: Chunk) -> bool:
        meta = stamped(chunk.meta, chunk.tensor)
        try:
            encoded, blob = encode(meta.id, chunk.tensor), encode_meta(meta)
            if self._budget.excess_bytes(encoded.nbytes + len(blob)):
                return self._refuse(meta.partition, "too_large")
            name = names.new_chunk(meta.id)
            temporary = files.Entry(self._layout.temporary, names.temporary_of(name))
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
                # Another process has replaced the chunk since its row was read here: read it again.
                self._known.forget([id])
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
            if (known := self._lookup(id)) is not None:
                self._discard(known.row, CorruptChunk("the file is missing"))
        self._counters.miss(known.row.partition if known else None)
        return None

    def meta(self, id: str) -> ChunkMeta | None:
        return known.meta if (known := self._lookup(id)) else None

    def metas(self, partition: str | None = None, epoch: str | None = None) -> Iterator[ChunkMeta]:
        try:
            for row in self._catalog.rows(partition, epoch):
                if (known := self._known.decoded(row)) is not None:
                    yield known.meta
        except sqlite3.Error as error:
            logger.warning("the catalog of %s cannot be read: %s", self.folder, error)

    def added(self, mark: Mark = None) -> tuple[list[ChunkMeta], Mark]:
        """See `TellsNew`."""
        return self._known.added(mark)

    def delete(self, id: str) -> bool:
        try:
            with self._catalog.transaction() as connection:
                gone = delete(connection, numbers_of(connection, [id]))
        except (sqlite3.Error, UnicodeError) as error:
            logger.warning("chunk %s cannot be deleted: %s", id, error)
            return False
        self._finish(gone)
        return bool(gone)

    def clear(self, partition: str | None = None) -> int:
        """Also removes files that were set aside. On a full disk the tensors are removed first, to make room for the catalog's change.

        Raises: StoreError if the catalog cannot be written.
        """
        try:
            leftovers.empty_quarantine(self._layout.root, None if partition is None else names.owner_of(partition))
            return self._clear(partition)
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, OSError) or sql.reason_of(error) not in ("full", "error"):
                raise StoreError(f"cannot clear the store in {self.folder} ({error}): check permissions") from error
            logger.warning("files of %s are removed first, its catalog cannot be written: %s", self.folder, error)
        try:
            for row in self._catalog.rows(partition, None):
                if isinstance(row, Row):
                    files.remove_chunk(self._layout.chunks, row.file)
            self._catalog.shorten_log()
            return self._clear(partition)
        except sqlite3.Error as error:
            remedy = "close it in every process, open it" if is_damage(error) else "free some space on its disk"
            raise StoreError(f"prompts remain in {self.folder} ({error}): {remedy} and clear it again") from error

    def stats(self, partition: str | None = None) -> StoreStats:
        held = (0, 0)
        with suppress(sqlite3.Error):
            held = self._catalog.totals(partition)
        return self._counters.stats(partition, entries=held[0], bytes=held[1])

    def touch(self, id: str) -> None:
        """Notes a use, by this store or a tier in front."""
        if self._uses.add(id) >= _PENDING_USES:
            self._settle(wait=False)

    def notice(self) -> bool:
        """See `KnownRows.notice`."""
        return self._known.notice()

    def pin(self, id: str) -> bool:
        """Keeps an entry from being evicted by this process until `unpin`; pins count. False if the entry is unknown."""
        if self._lookup(id) is None:
            return False
        self._pins.add(id)
        return True

    def unpin(self, id: str) -> None:
        self._pins.remove(id)

    def on_evict(self, listener: Callable[[str], None]) -> None:
        """Also called for entries removed by other processes, at the next read of this one."""
        self._listeners.add(listener)

    def flush(self) -> None:
        """Writes pending changes: uses, and removals of damaged entries."""
        self._settle(wait=True)

    def close(self) -> None:
        """A closed store finds nothing and takes nothing."""
        if not self._closed:
            self._closed = True
            self.flush()
            self._catalog.close()
            self._layout.close()

    def _lookup(self, id: str) -> Known | None:
        known = self._known.find(id)
        return None if known is None or self._condemned.has(known.row.number, known.row.file) else known

    def _load(self, known: Known) -> Chunk:
        row = known.row
        buffer = files.read_chunk(self._layout.chunks, row.file, row.file_bytes)
        return Chunk(known.meta, decode(row.id, buffer, row.checksum))

    def _commit(self, meta: ChunkMeta, blob: bytes, encoded: Encoded, name: str, temporary: files.Entry) -> bool:
        size = encoded.nbytes + len(blob)
        row = Row(meta.id, meta.partition, meta.epoch, blob, name, encoded.nbytes, encoded.checksum, size)
        uses = self._uses.take()
        try:
            with self._catalog.transaction() as connection:
                note(connection, uses)
                victims, reason = make_room(
                    connection, self._policy, self._budget, self._pins.held(), id=meta.id, nbytes=size
                )
                if victims is None:
                    return self._refuse(meta.partition, "pinned")
                gone = delete(connection, [*victims, *numbers_of(connection, [meta.id])])
                files.publish(temporary, self._layout.chunks, name)
                insert(connection, row)
        except BaseException:
            self._uses.put_back(uses)
            if not self._may_be_listed(row):
                files.remove_chunk(self._layout.chunks, name)
            raise
        self._counters.put(meta.partition)
        self._finish(gone, kept=meta.id, evicted=reason)
        return True

    def _may_be_listed(self, row: Row) -> bool:
        """Whether an interrupted commit took effect nevertheless. If unknown, the file is left to the next sweep."""
        try:
            found = self._catalog.row(row.id)
        except sqlite3.Error:
            return True
        return isinstance(found, Row) and found.file == row.file

    def _shrink(self) -> None:
        """Meets a budget smaller than the folder's content."""
        try:
            with self._catalog.transaction() as connection:
                victims, reason = make_room(connection, self._policy, self._budget)
                gone = delete(connection, victims or ())
        except sqlite3.Error as error:
            logger.warning("the budget of %s is not met yet: %s", self.folder, error)
            return
        self._finish(gone, evicted=reason)

    def _clear(self, partition: str | None) -> int:
        with self._catalog.transaction() as connection:
            gone = delete(connection, numbers_in(connection, partition))
        self._finish(gone)
        return len(gone)

    def _finish(self, gone: list[Removed], kept: str | None = None, evicted: str | None = None) -> None:
        """Forgets and unlinks removed entries, and tells the listeners; `kept` was only replaced. `evicted`: the reason."""
        self._known.forget(removed.id for removed in gone)
        for removed in gone:
            if removed.id != kept:
                self._uses.discard(removed.id)
                if evicted is not None:
                    self._counters.evicted(removed.partition, evicted)
            if removed.file is not None:
                files.remove_chunk(self._layout.chunks, removed.file)
        self._listeners.tell(removed.id for removed in gone if removed.id != kept)

    def _discard(self, row: Row | Unreadable, cause: CorruptChunk) -> None:
        """Removes a damaged chunk and sets its file aside, now or when nobody else writes."""
        readable = row if isinstance(row, Row) else None
        if self._condemned.add(row.number, readable.file if readable else None):
            logger.warning("a damaged chunk is set aside: %s", cause)
            self._counters.corrupt(readable.partition if readable else None)
            self._settle(wait=False)

    def _settle(self, *, wait: bool) -> None:
        """Writes the changes left pending by reads."""
        uses, condemned = self._uses.take(), self._condemned.all()
        try:
            with self._catalog.transaction(wait=wait) as connection:
                note(connection, uses)
                gone = delete_damaged(connection, condemned)
        except sqlite3.Error as error:
            busy = sql.reason_of(error) == "busy"
            if busy:
                self._uses.put_back(uses)
            if wait or not busy:
                logger.warning("uses and damage cannot be noted in %s: %s", self.folder, error)
            return
        for removed in gone:
            if removed.file is not None:
                owner = names.owner_of(removed.partition)
                leftovers.set_aside_chunk(self._layout.root, self._layout.chunks, removed.file, owner)
        self._finish(gone)
        self._condemned.forget(condemned)

    def _refuse(self, partition: str, reason: str) -> bool:
        self._counters.refused(partition, reason)
        return False
