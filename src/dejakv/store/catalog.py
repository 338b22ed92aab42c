"""The metadata of a store on disk: one SQLite database in WAL mode, shared by all processes that use the folder.

Every change is one short `BEGIN IMMEDIATE` transaction, so that a process that is killed leaves either all of it or nothing.
Triggers keep the totals and a journal of removed ids, from which other processes learn what is gone.
"""

import os
import sqlite3
import threading
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dejakv.store.eviction import Budget, Policy

VERSION = 1
JOURNAL_ROWS = 10_000
_BUSY_SECONDS = 10.0
_WRITES_PER_CHECKPOINT = 64
_SCHEMA = """
CREATE TABLE chunks (
    id TEXT PRIMARY KEY, partition TEXT NOT NULL, epoch TEXT NOT NULL, meta BLOB NOT NULL,
    file TEXT NOT NULL, file_bytes INTEGER NOT NULL, checksum TEXT NOT NULL, nbytes INTEGER NOT NULL,
    hits INTEGER NOT NULL, last_used INTEGER NOT NULL);
CREATE INDEX by_partition ON chunks (partition, nbytes);
CREATE INDEX by_lru ON chunks (last_used);
CREATE INDEX by_lfu ON chunks (hits, last_used);
CREATE TABLE totals (entries INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TABLE removed (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL);
CREATE TRIGGER added AFTER INSERT ON chunks BEGIN
    UPDATE totals SET entries = entries + 1, bytes = bytes + new.nbytes; END;
CREATE TRIGGER dropped AFTER DELETE ON chunks BEGIN
    UPDATE totals SET entries = entries - 1, bytes = bytes - old.nbytes;
    INSERT INTO removed (id) VALUES (old.id); END;
"""
_REASONS = {
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_READONLY: "read_only",
    sqlite3.SQLITE_BUSY: "busy",
    sqlite3.SQLITE_LOCKED: "busy",
}
_COLUMNS = "id, partition, epoch, meta, file, file_bytes, checksum, nbytes"


@dataclass(frozen=True)
class Row:
    """A chunk as the catalog knows it. `meta` is a blob of `metacodec`, `file` a path below the chunks' folder."""

    id: str
    partition: str
    epoch: str
    meta: bytes
    file: str
    file_bytes: int
    checksum: str
    nbytes: int


@dataclass(frozen=True)
class Removed:
    """What is left to do for a row that was taken out."""

    id: str
    partition: str
    file: str


class Catalog:
    """Thread-safe: one connection for reading and one for writing, so that no reader waits for a writer, of this or another
    process. Methods raise `sqlite3.Error`; the store above decides what that means."""

    def __init__(self, path: Path) -> None:
        self._reader = _Connection(path)
        self._writer = _Connection(path)
        self._journal_lock = threading.Lock()
        self._data_version = -1
        self._seen = 0
        self._removed_elsewhere: list[str] = []
        self._writes = 0
        with self._writer.use() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                _prepare(connection)
                self._seen = _last_removed(connection)
            finally:
                connection.execute("COMMIT")

    @contextmanager
    def transaction(self) -> Generator[sqlite3.Connection]:
        """Everything inside is kept, or, if it raises, nothing. One writer at a time, over all processes."""
        with self._writer.use() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                self._read_journal(connection)
                yield connection
                with self._journal_lock:
                    last = _last_removed(connection)
                    connection.execute("COMMIT")
                    self._seen = last
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            self._writes += 1
            if self._writes % _WRITES_PER_CHECKPOINT == 0:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def row(self, id: str) -> Row | None:
        with self._reader.use() as connection:
            found = connection.execute(f"SELECT {_COLUMNS} FROM chunks WHERE id = ?", (id,)).fetchone()
        return Row(*found) if found else None

    def rows(self, partition: str | None, epoch: str | None, page: int = 256) -> Iterator[Row]:
        """All rows, fetched in pages so that nothing is locked between them."""
        after = 0
        while True:
            with self._reader.use() as connection:
                found = connection.execute(
                    f"SELECT {_COLUMNS}, rowid FROM chunks WHERE rowid > :after AND (:partition IS NULL OR"
                    " partition = :partition) AND (:epoch IS NULL OR epoch = :epoch) ORDER BY rowid LIMIT :page",
                    {"after": after, "partition": partition, "epoch": epoch, "page": page},
                ).fetchall()
            if not found:
                return
            after = found[-1][-1]
            yield from (Row(*values[:-1]) for values in found)

    def totals(self, partition: str | None = None) -> tuple[int, int]:
        """Entries and bytes."""
        query, values = "SELECT entries, bytes FROM totals", ()
        if partition is not None:
            query, values = "SELECT count(*), coalesce(sum(nbytes), 0) FROM chunks WHERE partition = ?", (partition,)
        with self._reader.use() as connection:
            entries, held = connection.execute(query, values).fetchone()
        return entries, held

    def removed_elsewhere(self) -> list[str]:
        """Ids that other processes have taken out since the last call. Cheap if nobody changed anything."""
        with self._reader.use() as connection:
            version = connection.execute("PRAGMA data_version").fetchone()[0]
            if version != self._data_version:
                self._read_journal(connection)
                self._data_version = version
        if not self._removed_elsewhere:
            return []
        with self._journal_lock:
            found, self._removed_elsewhere = self._removed_elsewhere, []
        return found

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _read_journal(self, connection: sqlite3.Connection) -> None:
        with self._journal_lock:
            found = connection.execute(
                "SELECT seq, id, id IN (SELECT id FROM chunks) FROM removed WHERE seq > ? ORDER BY seq", (self._seen,)
            ).fetchall()
            if found:
                self._seen = found[-1][0]
                self._removed_elsewhere.extend(id for _, id, back in found if not back)


class _Connection:
    """A connection with its lock, opened by the process that uses it: one made before a fork must not be used after."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._pid = -1
        self._connection: sqlite3.Connection | None = None
        self._inherited: sqlite3.Connection | None = None

    @contextmanager
    def use(self) -> Generator[sqlite3.Connection]:
        with self._lock:
            if self._connection is None or self._pid != os.getpid():
                # The parent's is kept unused: closing it here would release what the parent still has.
                self._inherited = self._connection
                self._connection, self._pid = self._open(), os.getpid()
            try:
                yield self._connection
            except sqlite3.DatabaseError as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                    # SQLite notices damage only where it reads: without a mark, the next opening might not.
                    damage_marker(self._path).touch(mode=0o600)
                raise

    def close(self) -> None:
        with self._lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        try:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise sqlite3.OperationalError(str(error)) from error
        connection = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        for setting in ("journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON", "wal_autocheckpoint = 0"):
            connection.execute(f"PRAGMA {setting}")
        return connection


def damage_marker(path: Path) -> Path:
    """A file beside a catalog that says it is damaged and must be set aside."""
    return path.with_name(path.name + ".damaged")


def reason_of(error: sqlite3.Error) -> str:
    """Why a write failed, as refusals are counted: `full`, `read_only`, `busy` or `error`."""
    return _REASONS.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "error")


def insert(connection: sqlite3.Connection, row: Row) -> None:
    """Adds a row as the one used last."""
    connection.execute(
        f"INSERT INTO chunks ({_COLUMNS}, hits, last_used) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, {_NEXT_USE})",
        (row.id, row.partition, row.epoch, row.meta, row.file, row.file_bytes, row.checksum, row.nbytes),
    )


def touch(connection: sqlite3.Connection, id: str, hits: int) -> None:
    """Notes `hits` uses, the last of them just now."""
    connection.execute(f"UPDATE chunks SET hits = hits + ?, last_used = {_NEXT_USE} WHERE id = ?", (hits, id))


def delete(connection: sqlite3.Connection, ids: Iterable[str], file: str | None = None) -> list[Removed]:
    """Takes rows out (with `file`: only if that is still the row's). Their files are then the caller's to unlink."""
    gone: list[Removed] = []
    for id in ids:
        values = connection.execute("SELECT id, partition, file FROM chunks WHERE id = ?", (id,)).fetchone()
        found = Removed(*values) if values else None
        if found is not None and file in (None, found.file):
            connection.execute("DELETE FROM chunks WHERE id = ?", (id,))
            gone.append(found)
    connection.execute("DELETE FROM removed WHERE seq <= (SELECT max(seq) FROM removed) - ?", (JOURNAL_ROWS,))
    return gone


def make_room(
    connection: sqlite3.Connection,
    policy: Policy,
    budget: Budget,
    protected: Collection[str] = (),
    *,
    id: str | None = None,
    nbytes: int = 0,
) -> tuple[list[str] | None, str]:
    """What to evict before `id` with `nbytes` comes in or is replaced (no id: to meet the budget as it is), and why.

    Why is `bytes` or `entries`; the ids are None if what is not protected does not suffice.
    """
    entries, held = connection.execute("SELECT entries, bytes FROM totals").fetchone()
    old = connection.execute("SELECT nbytes FROM chunks WHERE id = ?", (id,)).fetchone()
    excess = budget.excess_bytes(held + nbytes - (old[0] if old else 0))
    surplus = budget.excess_entries(entries + (id is not None and old is None))
    reason = "bytes" if excess else "entries"
    chosen: list[str] = []
    freed = 0
    if excess or surplus:
        for other, size in connection.execute(f"SELECT id, nbytes FROM chunks ORDER BY {', '.join(policy.fields)}"):
            if other == id or other in protected:
                continue
            chosen.append(other)
            freed += size
            if freed >= excess and len(chosen) >= surplus:
                break
    return (chosen if freed >= excess and len(chosen) >= surplus else None), reason


_NEXT_USE = "(SELECT coalesce(max(last_used), 0) + 1 FROM chunks)"


def _statements(script: str) -> Iterator[str]:
    """The statements of a script, one by one: `executescript` would commit the transaction it is run in."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _prepare(connection: sqlite3.Connection) -> None:
    """Makes the tables of a new catalog. Raises: sqlite3.DatabaseError for one of another version."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, VERSION):
        raise sqlite3.DatabaseError("the catalog is of another version")
    if version == 0:
        for statement in _statements(_SCHEMA):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {VERSION}")


def _last_removed(connection: sqlite3.Connection) -> int:
    return connection.execute("SELECT coalesce(max(seq), 0) FROM removed").fetchone()[0]
