"""Which segments there are: an index over their headers in SQLite, which can be made again from the objects at any time.

Every change is one `BEGIN IMMEDIATE` transaction, so that a killed process leaves all of it or nothing. One database is shared by
all processes that use a folder; that of a store in memory is in memory.

A record is the description of a prompt, of rows of a blend, or of a named tensor. `links` says which rows of which segments it
consists of: when a segment leaves, so do its records. A segment that no record needs any more still serves as a prefix.

Objects are deleted after the commit that removes their rows, and `leaving` names them until then: a process that is killed in
between leaves objects that the next one deletes, and no row without its object.
"""

import json
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dejakv.identity import BLOCK_TOKENS as BLOCK
from dejakv.store.budgets import SKEW
from dejakv.store.connection import CatalogConnection, CatalogDamaged, ConnectionBusy, is_damage
from dejakv.store.counters import logger
from dejakv.store.keys import PrefixKeys
from dejakv.store.segment import NEVER, RECORD

Read = Callable[[str, Sequence[Any]], list[tuple[Any, ...]]]
VERSION = 3
_WRITE_SECONDS = 10.0
_READ_SECONDS = 1.0
"""Readers wait for no writer, only for the recovery of a killed process's log."""
_ROWS_PER_CHECKPOINT = 2000
"""Rows of about 64 puts. Indexing in bulk may write many more: each row is a page or two in the log."""
_MANY = 500
TABLES = {"segments", "blocks", "records", "links", "totals", "clock", "removed", "leaving"}
_TABLES = """
CREATE TABLE segments (
    n INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL, partition TEXT NOT NULL, epoch TEXT NOT NULL,
    kind TEXT NOT NULL, start INTEGER NOT NULL, stop INTEGER NOT NULL, prefix BLOB NOT NULL, keys BLOB NOT NULL,
    ids BLOB NOT NULL, record TEXT NOT NULL, nbytes INTEGER NOT NULL, created REAL NOT NULL, due REAL NOT NULL,
    used INTEGER NOT NULL, hits INTEGER NOT NULL);
CREATE TABLE blocks (key BLOB PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE records (
    n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, partition TEXT NOT NULL, epoch TEXT NOT NULL,
    kind TEXT NOT NULL, nbytes INTEGER NOT NULL, created REAL NOT NULL, due REAL NOT NULL, used INTEGER NOT NULL,
    hits INTEGER NOT NULL, about BLOB NOT NULL);
CREATE TABLE links (
    record INTEGER NOT NULL, segment INTEGER NOT NULL, start INTEGER NOT NULL, stop INTEGER NOT NULL,
    PRIMARY KEY (record, segment)) WITHOUT ROWID;
CREATE TABLE totals (partition TEXT PRIMARY KEY, entries INTEGER NOT NULL, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE clock (used INTEGER NOT NULL, token TEXT NOT NULL);
CREATE TABLE removed (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL);
CREATE TABLE leaving (name TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE INDEX segments_used ON segments (used);
CREATE INDEX segments_due ON segments (due) WHERE due < 1e18;
CREATE INDEX segments_prefix ON segments (prefix);
CREATE INDEX records_used ON records (used);
CREATE INDEX records_due ON records (due) WHERE due < 1e18;
CREATE INDEX links_segment ON links (segment);
CREATE TRIGGER segment_added AFTER INSERT ON segments BEGIN
    INSERT INTO totals VALUES (new.partition, 0, new.nbytes) ON CONFLICT DO UPDATE SET bytes = bytes + new.nbytes; END;
CREATE TRIGGER segment_gone AFTER DELETE ON segments BEGIN
    UPDATE totals SET bytes = bytes - old.nbytes WHERE partition = old.partition; END;
CREATE TRIGGER record_added AFTER INSERT ON records BEGIN
    INSERT INTO totals VALUES (new.partition, 1, new.nbytes)
    ON CONFLICT DO UPDATE SET entries = entries + 1, bytes = bytes + new.nbytes; END;
CREATE TRIGGER record_gone AFTER DELETE ON records BEGIN
    UPDATE totals SET entries = entries - 1, bytes = bytes - old.nbytes WHERE partition = old.partition;
    INSERT INTO removed (id) VALUES (old.id); END;
"""


@dataclass(frozen=True)
class SegmentSlice:
    """Rows `start` to `stop - 1` of a prompt: the first of segment number `n`, which has rows up to `end`; `due`, `record`: see `Segment`."""

    n: int
    name: str
    start: int
    stop: int
    end: int
    due: float = NEVER
    record: str = ""


@dataclass(frozen=True)
class RecordRow:
    """A record's row, its description still encoded."""

    n: int
    id: str
    partition: str
    epoch: str
    about: bytes


class Catalog:
    """The rows of segments and records. Thread-safe: one connection for reading and one for writing, so that no reader waits for a writer,
    of this or another process. Methods raise `sqlite3.Error`. Those that take `sql` are used within a `transaction`.

    path          None: in memory
    noted_damage  see `CatalogConnection`
    """

    def __init__(self, path: Path | None, *, noted_damage: Callable[[], None] = lambda: None) -> None:
        self._noted_damage = noted_damage
        self._writer = CatalogConnection(path, _WRITE_SECONDS, noted_damage=noted_damage)
        # A database in memory belongs to one connection.
        self._reader = self._writer
        if path is not None:
            self._reader = CatalogConnection(path, _READ_SECONDS, noted_damage=noted_damage)

        self._version = (-1, -1)
        self._seen = 0
        self._news: list[tuple[str, bool]] = []
        self._complete = True
        self._copied = 0
        self._deleted: set[str] = set()
        self.loose: set[str] = set()
        """Names of segments that may describe prompts without state, since the last comparison with all objects."""

        try:
            with self._writer.use() as sql:
                sql.execute("BEGIN IMMEDIATE")
                _prepare(sql)
                # What was removed before the opening is no news for this process.
                self._seen = _last_removed(sql)
                self.token = str(sql.execute("SELECT token FROM clock").fetchone()[0])
                sql.execute("COMMIT")
        except BaseException:
            self.close()
            raise

    @contextmanager
    def transaction(self, *, wait: bool = True) -> Generator[sqlite3.Connection]:
        """Commits everything inside, or nothing if it raises. One writer at a time, across all processes.

        wait  False: raises at once if another writer is at work
        """
        with self._writer.use(wait=wait) as sql:
            sql.execute("BEGIN IMMEDIATE")
            try:
                # Before this transaction's own removals, which `_commit` marks as seen.
                self._read_journal(sql)
                # A copy: other threads add names meanwhile, which the next transaction strikes off.
                deleted = list(self._deleted)
                sql.executemany("DELETE FROM leaving WHERE name = ?", ((name,) for name in deleted))
                yield sql
                self._commit(sql)
                self._deleted.difference_update(deleted)
            except BaseException:
                if sql.in_transaction:
                    sql.execute("ROLLBACK")
                raise
            changed = sql.total_changes - self._copied  # less than 0 after the connection was made anew
            # Automatic checkpoints are off: one inside a commit would make that writer wait.
            if not 0 <= changed < _ROWS_PER_CHECKPOINT:
                self._copied = sql.total_changes
                try:  # if it fails, the commit is still safe in the log
                    sql.execute("PRAGMA wal_checkpoint(PASSIVE)")
                except sqlite3.Error as error:
                    logger.warning("the log of the catalog cannot be shortened now: %s", error)
                    if is_damage(error):
                        self._noted_damage()

    def read(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._reader.use() as sql:
            return sql.execute(query, values).fetchall()

    def empty_log(self) -> None:
        """Writes the log back into the catalog and leaves nothing in it. Raises: sqlite3.Error if others read it all the while."""
        until = time.monotonic() + _WRITE_SECONDS
        with self._writer.use() as sql:
            # SQLite waits for readers, but not for a checkpoint of another process.
            while sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                if time.monotonic() > until:
                    raise ConnectionBusy("another process has been reading the catalog for too long")
                time.sleep(0.01)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    # What is there

    def longest(
        self, keys: PrefixKeys, max_tokens: int, now: float, *, partial_block: bool = True
    ) -> list[SegmentSlice]:
        """The longest stored prefix of at most `max_tokens` tokens without a gap, first rows first.

        partial_block  also rows inside the block where the prompt leaves all others, of prompts without media
        """
        segments_by_key: dict[bytes, tuple[int, str, int, int, float, str]] = {}

        def look(prefix_keys: Sequence[bytes]) -> None:
            for offset in range(0, len(prefix_keys), _MANY):
                key_batch = prefix_keys[offset : offset + _MANY]
                query = (
                    "SELECT b.key, s.n, s.name, s.start, s.stop, s.due, s.record FROM blocks b JOIN segments s ON s.n = b.n"
                    f" WHERE b.key IN ({','.join('?' * len(key_batch))}) AND {alive('s')}"
                )
                segments_by_key.update({row[0]: row[1:] for row in self.read(query, (*key_batch, now, now + SKEW))})

        # Full blocks first: one query finds the deepest, and only tails behind it can be longer.
        top = max_tokens // BLOCK
        look(keys.full[1 : top + 1])
        deepest = next((i for i in range(top, 0, -1) if keys.full[i] in segments_by_key), 0)
        tails = [deepest * BLOCK + i for i in range(1, BLOCK) if deepest * BLOCK + i <= max_tokens]
        look([keys.at(end) for end in tails])
        ends = [end for end in reversed(tails) if keys.at(end) in segments_by_key]

        limit = max_tokens
        # The longest end may lack rows before it (evicted): then the next shorter one is tried.
        for end in (*ends, *(i * BLOCK for i in range(deepest, 0, -1))):
            if end > limit or keys.at(end) not in segments_by_key:
                continue
            slices: list[SegmentSlice] = []
            prefix_end = end
            # Backwards from the end: only a segment's own start says where the one before it ends.
            while prefix_end:
                key = keys.at(prefix_end)
                if key not in segments_by_key and prefix_end % BLOCK:
                    look([key])
                if key not in segments_by_key:
                    break
                n, name, start, stop, due, record = segments_by_key[key]
                slices.append(SegmentSlice(n, name, start, prefix_end, stop, due, record))
                prefix_end = start
            if not prefix_end:
                slices.reverse()
                return self._further(keys, slices, max_tokens, now) if partial_block and not keys.spans else slices
            limit = prefix_end - 1  # what needs the missing rows is of no use
        return []

    def _further(self, keys: PrefixKeys, slices: list[SegmentSlice], max_tokens: int, now: float) -> list[SegmentSlice]:
        # No block has a name inside of it, so the rows of the next segments are compared by tokens.
        last = slices[-1]
        end = last.stop
        if end % BLOCK or end >= max_tokens:
            return slices
        query = (
            "SELECT n, name, start, stop, due, record, ids FROM segments WHERE n = ? UNION ALL SELECT * FROM (SELECT n, name, start,"
            f" stop, due, record, ids FROM segments s WHERE prefix = ? AND {alive('s')} ORDER BY n DESC LIMIT 4)"
        )

        best, extra = 0, last
        for n, name, start, stop, due, record, ids in self.read(query, (last.n, keys.at(end), now, now + SKEW)):
            stored_ids = np.frombuffer(ids, "<u4")[end - start :][
                : min(max_tokens - end, BLOCK - 1)
            ]  # none of a segment with media
            same = stored_ids == keys.ids[end : end + len(stored_ids)]
            length = len(same) if same.all() else int(same.argmin())
            if length > best:
                best, extra = length, SegmentSlice(n, name, max(start, last.start), end + length, stop, due, record)
        if not best:
            return slices

        if extra.n == last.n:
            return [*slices[:-1], extra]
        return [*slices, SegmentSlice(extra.n, extra.name, end, extra.stop, extra.end, extra.due, extra.record)]

    def chain(self, tokens: int, key: bytes, now: float, read: Read | None = None) -> list[SegmentSlice]:
        """The pieces of a prefix of so many tokens, by its key; none if there is a gap. `read`: within a transaction."""
        query = (
            "SELECT s.n, s.name, s.start, s.stop, s.due, s.record, s.prefix FROM blocks b JOIN segments s ON s.n = b.n"
            f" WHERE b.key = ? AND {alive('s')}"
        )
        slices: list[SegmentSlice] = []
        while tokens:
            segment_rows = (read or self.read)(query, (key, now, now + SKEW))
            # The block may have been stored anew, in a segment with other rows.
            if not segment_rows or not segment_rows[0][2] < tokens <= segment_rows[0][3]:
                return []
            n, name, start, end, due, record, key = segment_rows[0]
            slices.append(SegmentSlice(n, name, start, tokens, end, due, record))
            tokens = start

        return slices[::-1]

    def pieces(self, record: int) -> list[SegmentSlice]:
        """The pieces of a record, by its number, first rows first; none if another has replaced it."""
        # A segment of the kind RECORD has the description alone, and no rows.
        query = (
            "SELECT s.n, s.name, l.start, l.stop, s.stop, s.due, s.record FROM links l JOIN segments s ON s.n = l.segment"
            f" WHERE l.record = ? AND s.kind != '{RECORD}' ORDER BY l.start"
        )
        return [SegmentSlice(*row) for row in self.read(query, (record,))]

    def sizes(self, slices: Iterable[SegmentSlice]) -> dict[str, int]:
        """Bytes of the segments of these, by name."""
        query = "SELECT name, nbytes FROM segments WHERE n IN (SELECT value FROM json_each(?))"
        return dict(self.read(query, (json.dumps([segment_slice.n for segment_slice in slices]),)))

    def record(self, id: str, now: float) -> RecordRow | None:
        query = f"SELECT n, id, partition, epoch, about FROM records r WHERE id = ? AND {alive('r')}"
        matches = self.read(query, (id, now, now + SKEW))
        return RecordRow(*matches[0]) if matches else None

    def records(
        self, partition: str | None, epoch: str | None, now: float, *, after: int = 0, page: int = 256
    ) -> Generator[RecordRow]:
        """All of higher numbers than `after`, fetched in pages without a lock between them."""
        query = (
            f"SELECT n, id, partition, epoch, about FROM records r WHERE n > ?3 AND (?4 IS NULL OR partition = ?4)"
            f" AND (?5 IS NULL OR epoch = ?5) AND {alive('r', '?1', '?2')} ORDER BY n LIMIT ?6"
        )
        # By number and not by offset: rows that come or leave meanwhile move no page.
        while True:
            page_rows = self.read(query, (now, now + SKEW, after, partition, epoch, page))
            if not page_rows:
                return
            after = page_rows[-1][0]
            for row in page_rows:
                yield RecordRow(*row)

    def next_due(self) -> float | None:
        """Time at which the next entry expires, in seconds since 1970; None: none does."""
        query = "SELECT min(due) FROM (SELECT min(due) AS due FROM records WHERE due < 1e18 UNION ALL SELECT min(due) FROM segments WHERE due < 1e18)"
        return self.read(query)[0][0]

    def totals(self, partition: str | None = None) -> tuple[int, int]:
        """Entries and bytes."""
        with self._reader.use() as sql:
            return totals(sql, partition)

    def leaving(self) -> list[str]:
        """Names of objects to delete, until `deleted` is called for them."""
        return [name for (name,) in self.read("SELECT name FROM leaving") if name not in self._deleted]

    def deleted(self, names: Iterable[str]) -> None:
        """Note deleted objects, for the next transaction to strike off."""
        self._deleted.update(names)

    def removed_elsewhere(self) -> tuple[list[tuple[str, bool]], bool]:
        """Return the records removed by other processes since the last call, as (id, stored again), and whether the journal names all.

        Cheap if nothing has changed.
        """
        with self._reader.use() as sql:
            # SQLite counts commits of other connections only; a new connection begins anew.
            version = (self._reader.openings, sql.execute("PRAGMA data_version").fetchone()[0])
            if version != self._version:
                self._read_journal(sql)
                self._version = version

            news, complete = self._news, self._complete
            self._news, self._complete = [], True
        return news, complete

    def _commit(self, sql: sqlite3.Connection) -> None:
        # This transaction's own removals are no news from elsewhere. They are marked as seen before the commit, without keeping
        # the readers' lock: until the commit they cannot see them anyway.
        last = _last_removed(sql)
        with self._reader.lock:
            before, self._seen = self._seen, max(self._seen, last)
        try:
            sql.execute("COMMIT")
        except BaseException:
            with self._reader.lock:
                self._seen, self._version = before, (-1, -1)
            raise

    def _read_journal(self, sql: sqlite3.Connection) -> None:
        with self._reader.lock:
            query = "SELECT seq, id, id IN (SELECT id FROM records) FROM removed WHERE seq > ? ORDER BY seq"
            journal_rows = sql.execute(query, (self._seen,)).fetchall()
            if journal_rows:
                # The journal keeps its latest rows alone: a gap in the numbers means missed removals.
                self._complete = self._complete and journal_rows[0][0] == self._seen + 1
                self._seen = journal_rows[-1][0]
                self._news += [(id, bool(back)) for _, id, back in journal_rows]


def reason_of(error: sqlite3.Error) -> str:
    """The reason of a failed write, as counted in refusals: `full`, `read_only`, `busy` or `error`."""
    reasons = {
        sqlite3.SQLITE_FULL: "full",
        sqlite3.SQLITE_READONLY: "read_only",
        sqlite3.SQLITE_BUSY: "busy",
        sqlite3.SQLITE_LOCKED: "busy",
    }
    return reasons.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "error")


def alive(table: str, now: str = "?", latest: str = "?") -> str:
    """Condition for entries that are not expired, with two values: the present time, and the latest possible time of their making."""
    return f"({table}.due > {now} AND ({table}.due >= 1e18 OR {table}.created <= {latest}))"


def totals(sql: sqlite3.Connection, partition: str | None) -> tuple[int, int]:
    query = "SELECT coalesce(sum(entries), 0), coalesce(sum(bytes), 0) FROM totals WHERE ?1 IS NULL OR partition = ?1"
    return sql.execute(query, (partition,)).fetchone()


def _last_removed(sql: sqlite3.Connection) -> int:
    return sql.execute("SELECT coalesce(max(seq), 0) FROM removed").fetchone()[0]


def _prepare(sql: sqlite3.Connection) -> None:
    """Creates the tables of a new catalog. Raises: Damaged for one with others."""
    version = sql.execute("PRAGMA user_version").fetchone()[0]
    schema_names = {row[0] for row in sql.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'trigger')")}
    if version == VERSION:
        if (
            not TABLES | {"segment_added", "segment_gone"} <= schema_names
            or not sql.execute("SELECT 1 FROM clock").fetchone()
        ):
            raise CatalogDamaged("the catalog lacks a table")
        return

    if version or schema_names:
        raise CatalogDamaged(f"the catalog says it is of version {version}")
    statement = ""
    # Not `executescript`, which would commit the surrounding transaction.
    for line in _TABLES.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            sql.execute(statement)
            statement = ""
    sql.execute("INSERT INTO clock VALUES (1, lower(hex(randomblob(16))))")
    sql.execute(f"PRAGMA user_version = {VERSION}")
