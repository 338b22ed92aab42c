"""A store in a folder of this user: chunk files and a catalog, shared by processes, kept across restarts (see `names`)."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
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
    files_of,
    note,
    numbers_in,
    numbers_of,
    still_damaged,
)
from dejakv.store.catalog_tree import leave, remove, remove_below
from dejakv.store.codec import CorruptChunk, decode
from dejakv.store.connection import is_damage
from dejakv.store.counters import FAILED_WRITES, Counters, Listeners, logger
from dejakv.store.disk_writer import DiskWriter, Refused, Written
from dejakv.store.eviction import Budget, PolicyName, policy_named
from dejakv.store.known import Known, KnownRows, Mark
from dejakv.store.layout import open_folder
from dejakv.store.usage import Condemned, PendingUses

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
        self,
        folder: str | Path,
        max_bytes: int = 0,
        max_entries: int = 0,
        policy: PolicyName = "lru",
    ) -> None:
        self.folder = Path(folder)
        budget = Budget(max_bytes, max_entries)
        order = policy_named(policy)
        self._counters = Counters()
        self._listeners = Listeners()
        self._uses = PendingUses()
        self._condemned = Condemned()
        self._layout, self._catalog, damaged = open_folder(self.folder)
        self._writer = DiskWriter(self._layout, self._catalog, budget, order, self._uses)
        self._known = KnownRows(self._catalog, self._listeners, self._discard)
        self._closed = self._warned = False
        for _ in range(damaged):
            self._counters.corrupt()
        self._shrink()

    def put(self, chunk: Chunk) -> bool:
        try:
            self._wrote(self._writer.put(chunk))
        except Refused as reason:
            self._counters.refused(chunk.meta.partition, str(reason))
            if str(reason) in FAILED_WRITES and not self._warned:
                self._warned = True
                logger.warning(
                    "state is not stored in %s (%s): see that its disk has space and that you may write to it; "
                    "further failures are only counted",
                    self.folder,
                    FAILED_WRITES[str(reason)],
                )
            return False
        self._counters.put(chunk.meta.partition)
        return True

    def split(self, node: Chunk, rest: Chunk) -> bool:
        """See `Parents`."""
        try:
            self._wrote(self._writer.split(node, rest))
        except Refused as reason:
            logger.info("chunk %s is not split: %s", rest.meta.id, reason)
            return False
        return True

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
                numbers = numbers_of(connection, [id])
                gone = [removed for number in numbers for removed in leave(connection, number)]
        except (sqlite3.Error, UnicodeError) as error:
            if isinstance(error, sqlite3.Error) and sql.reason_of(error) in ("full", "error") and self._make_space(id):
                return self.delete(id)
            logger.warning("chunk %s cannot be deleted: %s", id, error)
            return False
        self._finish(gone)
        return any(removed.id == id and not removed.node for removed in gone)

    def _make_space(self, id: str) -> bool:
        """For the catalog's change on a full disk: removes the tensor of an entry that is to go, and of which no other has rows."""
        known = self._known.find(id)
        try:
            if known is None or self._catalog.has_children(id) or not files.there(self._layout.chunks, known.row.file):
                return False
            files.remove_chunk(self._layout.chunks, known.row.file)
            self._catalog.shorten_log()
        except (OSError, sqlite3.Error):
            return False
        return not files.there(self._layout.chunks, known.row.file)

    def discard(self, id: str) -> None:
        """See `Parents`."""
        known = self._lookup(id)
        if known is not None and self._condemned.add(known.row.number, known.row.file):
            self._settle(wait=False)

    def clear(self, partition: str | None = None) -> int:
        """Also removes files that were set aside. On a full disk the tensors are removed first, to make room for the catalog's change.

        Raises: StoreError if the catalog cannot be written.
        """
        try:
            leftovers.empty_quarantine(self._layout.root, None if partition is None else names.owner_of(partition))
            removed = self._clear(partition)
            self._catalog.shorten_log()
            return removed
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

    def scrub(self, partition: str | None = None) -> None:
        """See `Scrubs`: files set aside, those of killed processes, and the catalog's log."""
        try:
            leftovers.empty_quarantine(self._layout.root, None if partition is None else names.owner_of(partition))
            with self._catalog.transaction() as connection:
                leftovers.sweep(self._layout.chunks, self._layout.temporary, set(files_of(connection)))
            self._catalog.empty_log()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"the entries are removed from {self.folder}, traces of them may be left ({error}): purge again"
            ) from error

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

    def _shrink(self) -> None:
        """Meets a budget smaller than the folder's content."""
        try:
            gone, reason = self._writer.shrink()
        except (sqlite3.Error, Refused) as error:
            logger.warning("the budget of %s is not met yet: %s", self.folder, error)
            return
        self._wrote(Written(gone, gone, reason, ""))

    def _clear(self, partition: str | None) -> int:
        with self._catalog.transaction() as connection:
            gone = delete(connection, numbers_in(connection, partition))
        self._finish(gone)
        return sum(not removed.node for removed in gone)

    def _wrote(self, written: Written) -> None:
        for removed in written.evicted:
            if not removed.node:
                self._counters.evicted(removed.partition, written.reason)
        self._finish(written.gone, written.replaced)

    def _finish(self, gone: Sequence[Removed], kept: str = "") -> None:
        """Forgets and unlinks removed entries, and tells the listeners; `kept` was only replaced."""
        self._known.forget(removed.id for removed in gone)
        for removed in gone:
            if removed.id != kept:
                self._uses.discard(removed.id)
            if removed.file is not None:
                files.remove_chunk(self._layout.chunks, removed.file)
        self._listeners.tell(removed.id for removed in gone if removed.id != kept)

    def _discard(self, row: Row | Unreadable, cause: CorruptChunk) -> None:
        """Removes a damaged chunk and sets its file aside, now or when nobody else writes."""
        readable = row if isinstance(row, Row) else None
        if self._condemned.add(row.number, readable.file if readable else None):
            # Words, not the exception: its frames hold the chunk's map, and a log handler may keep what it is given.
            logger.warning("a damaged chunk is set aside: %s", str(cause))
            self._counters.corrupt(readable.partition if readable else None)
            self._settle(wait=False)

    def _settle(self, *, wait: bool) -> None:
        """Writes the changes left pending by reads."""
        uses, condemned = self._uses.take(), self._condemned.all()
        try:
            with self._catalog.transaction(wait=wait) as connection:
                note(connection, uses)
                lost = remove(connection, still_damaged(connection, condemned))
                needed = remove_below(connection, [removed.id for removed in lost])
        except sqlite3.Error as error:
            busy = sql.reason_of(error) == "busy"
            if busy:
                self._uses.put_back(uses)
            if wait or not busy:
                logger.warning("uses and damage cannot be noted in %s: %s", self.folder, error)
            return
        for removed in lost:
            if removed.file is not None:
                owner = names.owner_of(removed.partition)
                leftovers.set_aside_chunk(self._layout.root, self._layout.chunks, removed.file, owner)
        self._finish([*needed, *lost])
        self._condemned.forget(condemned)
