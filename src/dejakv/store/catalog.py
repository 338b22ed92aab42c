"""The metadata of a store on disk: one SQLite database in WAL mode, shared by all processes that use the folder.

Every change is one short `BEGIN IMMEDIATE` transaction, so that a killed process leaves either all of it or nothing.
Triggers keep the totals and a journal of removed ids, from which other processes learn of removals. The statements are in
`catalog_rows` and `catalog_tree`.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dejakv.store.catalog_rows import COLUMNS, Row, Unreadable, row_of
from dejakv.store.connection import Connection, Damaged, is_damage
from dejakv.store.counters import logger
from dejakv.store.schema import check_schema

VERSION = 2
_WRITE_SECONDS = 10.0
_READ_SECONDS = 1.0
"""Readers never wait for a writer, only for a process that recovers the log of a killed one."""
_WRITES_PER_CHECKPOINT = 64
_SCHEMA = """
CREATE TABLE chunks (
    id TEXT PRIMARY KEY, partition TEXT NOT NULL, epoch TEXT NOT NULL, meta BLOB NOT NULL,
    file TEXT NOT NULL, file_bytes INTEGER NOT NULL, checksum TEXT NOT NULL, nbytes INTEGER NOT NULL,
    hits INTEGER NOT NULL, last_used INTEGER NOT NULL,
    parent TEXT NOT NULL DEFAULT '', node INTEGER NOT NULL DEFAULT 0);
CREATE INDEX by_partition ON chunks (partition, nbytes);
CREATE INDEX by_lru ON chunks (last_used);
CREATE INDEX by_lfu ON chunks (hits, last_used);
CREATE TABLE totals (entries INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TABLE removed (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL);
"""
_PARENTS = """
CREATE INDEX by_parent ON chunks (parent) WHERE parent != '';
CREATE TRIGGER added AFTER INSERT ON chunks BEGIN
    UPDATE totals SET entries = entries + (new.node = 0), bytes = bytes + new.nbytes; END;
CREATE TRIGGER dropped AFTER DELETE ON chunks BEGIN
    UPDATE totals SET entries = entries - (old.node = 0), bytes = bytes - old.nbytes;
    INSERT INTO removed (id) VALUES (old.id); END;
"""
"""What version 2 does differently."""
_FROM_1 = """
ALTER TABLE chunks ADD COLUMN parent TEXT NOT NULL DEFAULT '';
ALTER TABLE chunks ADD COLUMN node INTEGER NOT NULL DEFAULT 0;
DROP TRIGGER added;
DROP TRIGGER dropped;
"""
_REASONS = {
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_READONLY: "read_only",
    sqlite3.SQLITE_BUSY: "busy",
    sqlite3.SQLITE_LOCKED: "busy",
}


@dataclass(frozen=True)
class RemovedElsewhere:
    """Prompts that other processes removed, and entries that they changed. `complete` is False if the journal no longer names
    all of them."""

    ids: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    complete: bool = True


class Catalog:
    """Thread-safe: one connection for reading and one for writing, so that no reader waits for a writer, of this or another
    process. Methods raise `sqlite3.Error`, which the store interprets.

    admit, noted_damage  see `Connection`
    """

    def __init__(self, path: Path, *, admit: Callable[[], None], noted_damage: Callable[[], None]) -> None:
        self._noted_damage = noted_damage
        self._reader = Connection(path, _READ_SECONDS, admit=admit, noted_damage=noted_damage)
        self._writer = Connection(path, _WRITE_SECONDS, admit=admit, noted_damage=noted_damage)
        self._journal_lock = threading.Lock()
        self._version = (-1, -1)
        self._seen = 0
        self._removed: list[str] = []
        self._changed: list[str] = []
        self._complete = True
        self._writes = 0
        try:
            with self._writer.use() as connection:
                connection.execute("BEGIN IMMEDIATE")
                _prepare(connection)
                self._seen = _last_removed(connection)
                connection.execute("COMMIT")
        except BaseException:
            self.close()
            raise

    @contextmanager
    def transaction(self, *, wait: bool = True) -> Generator[sqlite3.Connection]:
        """Commits everything inside, or nothing if it raises. One writer at a time, across all processes.

        wait  False: raises at once (`busy`) if another writer is at work
        """
        with self._writer.use(wait=wait) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                self._read_journal(connection)
                yield connection
                self._commit(connection)
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            self._writes += 1
            if self._writes % _WRITES_PER_CHECKPOINT == 0:
                self._checkpoint(connection, "PASSIVE")

    def shorten_log(self) -> None:
        """Writes the log back into the catalog and frees its space, as far as possible."""
        with self._writer.use() as connection:
            self._checkpoint(connection, "TRUNCATE")

    def empty_log(self) -> None:
        """Writes the log back into the catalog and leaves nothing in it. Raises: sqlite3.Error if others read it all the while."""
        until = time.monotonic() + _WRITE_SECONDS
        with self._writer.use() as connection:
            # SQLite waits for readers, but not for a checkpoint of another process.
            while connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                if time.monotonic() > until:
                    raise sqlite3.OperationalError("another process has been reading the catalog for too long")
                time.sleep(0.01)

    def row(self, id: str) -> Row | Unreadable | None:
        with self._reader.use() as connection:
            found = connection.execute(f"SELECT {COLUMNS} FROM chunks WHERE id = ?", (id,)).fetchone()
        return row_of(found) if found else None

    def file_of(self, number: int) -> str | None:
        """The file of the row of that number."""
        with self._reader.use() as connection:
            found = connection.execute("SELECT file FROM chunks WHERE rowid = ?", (number,)).fetchone()
        return found[0] if found else None

    def rows(
        self, partition: str | None, epoch: str | None, page: int = 256, *, after: int = -1
    ) -> Iterator[Row | Unreadable]:
        """All rows of higher numbers than `after`, fetched in pages without a lock between them."""
        while True:
            with self._reader.use() as connection:
                found = connection.execute(
                    f"SELECT {COLUMNS} FROM chunks WHERE rowid > :after AND (:partition IS NULL OR"
                    " partition = :partition) AND (:epoch IS NULL OR epoch = :epoch) ORDER BY rowid LIMIT :page",
                    {"after": after, "partition": partition, "epoch": epoch, "page": page},
                ).fetchall()
            if not found:
                return
            after = found[-1][0]
            yield from map(row_of, found)

    def has_children(self, id: str) -> bool:
        """Whether the rows of other entries are in this one."""
        with self._reader.use() as connection:
            return connection.execute("SELECT 1 FROM chunks WHERE parent = ? LIMIT 1", (id,)).fetchone() is not None

    def totals(self, partition: str | None = None) -> tuple[int, int]:
        """Entries and bytes; counted where the row that has them is damaged, which the next write repairs."""
        with self._reader.use() as connection:
            kept = connection.execute("SELECT entries, bytes FROM totals").fetchone() if partition is None else None
            if kept is not None and all(type(number) is int and number >= 0 for number in kept):
                return kept
            return connection.execute(
                "SELECT coalesce(sum(node = 0), 0), cast(coalesce(sum(nbytes), 0) AS INTEGER) FROM chunks WHERE ? IS NULL OR partition = ?",
                (partition, partition),
            ).fetchone()

    def removed_elsewhere(self) -> RemovedElsewhere:
        """Entries removed by other processes since the last call. Cheap if nothing has changed."""
        with self._reader.use() as connection:
            version = (self._reader.openings, connection.execute("PRAGMA data_version").fetchone()[0])
            if version != self._version:
                self._read_journal(connection)
                self._version = version
            if not self._removed and not self._changed and self._complete:
                return RemovedElsewhere()
            with self._journal_lock:
                found = RemovedElsewhere(tuple(self._removed), tuple(self._changed), self._complete)
                self._removed, self._changed, self._complete = [], [], True
        return found

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _commit(self, connection: sqlite3.Connection) -> None:
        # This transaction's own removals are not news from elsewhere. They are marked as seen before the commit and without
        # keeping the lock, for which readers would wait: until the commit they cannot see them anyway.
        last = _last_removed(connection)
        with self._journal_lock:
            before, self._seen = self._seen, max(self._seen, last)
        try:
            connection.execute("COMMIT")
        except BaseException:
            with self._journal_lock:
                self._seen, self._version = before, (-1, -1)
            raise

    def _checkpoint(self, connection: sqlite3.Connection, kind: str) -> None:
        # If it fails, the commit is still safe in the log.
        try:
            connection.execute(f"PRAGMA wal_checkpoint({kind})")
        except sqlite3.Error as error:
            logger.warning("the log of the catalog cannot be shortened now: %s", error)
            if is_damage(error):
                self._noted_damage()

    def _read_journal(self, connection: sqlite3.Connection) -> None:
        with self._journal_lock:
            found = connection.execute(
                "SELECT seq, id, id IN (SELECT id FROM chunks WHERE node = 0) FROM removed WHERE seq > ? ORDER BY seq",
                (self._seen,),
            ).fetchall()
            if found:
                self._complete = self._complete and found[0][0] == self._seen + 1
                self._seen = found[-1][0]
                self._removed.extend(id for _, id, back in found if not back)
                self._changed.extend(id for _, id, back in found if back)


def reason_of(error: sqlite3.Error) -> str:
    """The reason of a failed write, as counted in refusals: `full`, `read_only`, `busy` or `error`."""
    return _REASONS.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "error")


def _statements(script: str) -> Iterator[str]:
    """The statements of a script, one by one: `executescript` would commit the running transaction."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _prepare(connection: sqlite3.Connection) -> None:
    """Creates the tables of a new catalog, and brings those of version 1 up to date.

    Raises: sqlite3.DatabaseError for a catalog of another version, and Damaged for one with other tables or triggers.
    """
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, 1, VERSION):
        raise Damaged(f"the catalog says it is of version {version}")
    if version != VERSION:
        for statement in _statements((_FROM_1 if version else _SCHEMA) + _PARENTS):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {VERSION}")
    check_schema(connection, _SCHEMA + _PARENTS)


def _last_removed(connection: sqlite3.Connection) -> int:
    return connection.execute("SELECT coalesce(max(seq), 0) FROM removed").fetchone()[0]
