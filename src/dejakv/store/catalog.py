"""The catalog: an index over the headers of segments in SQLite.

It can be made again from the objects at any time.

Every change is one `BEGIN IMMEDIATE` transaction, so that a killed process leaves all of it or
nothing. All processes that use a folder share one database; the database of a store in memory is in
memory.

An entry is the description of a prompt, of rows of a blend, or of a named tensor. The table `links`
says which rows of which segments it consists of: when a segment leaves, so do its entries. A
segment that no entry needs any more still serves as a prefix.

Objects are deleted after the commit that removes their rows, and `objects_to_delete` names them
until then. A process that is killed in between leaves objects that the next one deletes, and no row
without its object.
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
from dejakv.store.prefix_keys import PrefixKeys
from dejakv.store.segment import DESCRIPTION, MAX_SEGMENT_TOKENS, NEVER

Read = Callable[[str, Sequence[Any]], list[tuple[Any, ...]]]
"""Runs a query with values and returns all rows."""
VERSION = 3
"""Version of the tables, in `PRAGMA user_version`."""
_WRITE_SECONDS = 10.0
_READ_SECONDS = 1.0
"""Readers wait for no writer, only for the recovery of a killed process's log."""
_ROWS_PER_CHECKPOINT = 2000
"""Rows of about 64 puts: each takes a page or two of the log. Bulk indexing writes many more."""
_KEYS_PER_QUERY = 500
_STRIDE = MAX_SEGMENT_TOKENS // BLOCK
"""Blocks between the ends of a prompt's prefixes that are looked up first.

As many as the longest segment has, but for engines whose pages are longer.
"""
_LARGEST_HOLE = 4
"""Ends without a name between others: a page of 1,024 tokens of a newer segment that has left."""
_FIRST_STRIDES = 32
"""Ends in the first query; in each later one twice as many as before."""
TABLES = {"segments", "blocks", "records", "links", "totals", "clock", "removed", "leaving"}
_TABLES = """
CREATE TABLE segments (
    n INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL, partition TEXT NOT NULL, \
epoch TEXT NOT NULL,
    kind TEXT NOT NULL, start INTEGER NOT NULL, stop INTEGER NOT NULL, prefix BLOB NOT NULL, \
keys BLOB NOT NULL,
    ids BLOB NOT NULL, record TEXT NOT NULL, nbytes INTEGER NOT NULL, created REAL NOT NULL, \
due REAL NOT NULL,
    used INTEGER NOT NULL, hits INTEGER NOT NULL);
CREATE TABLE blocks (key BLOB PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE records (
    n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, partition TEXT NOT NULL, \
epoch TEXT NOT NULL,
    kind TEXT NOT NULL, nbytes INTEGER NOT NULL, created REAL NOT NULL, due REAL NOT NULL, \
used INTEGER NOT NULL,
    hits INTEGER NOT NULL, about BLOB NOT NULL);
CREATE TABLE links (
    record INTEGER NOT NULL, segment INTEGER NOT NULL, start INTEGER NOT NULL, \
stop INTEGER NOT NULL,
    PRIMARY KEY (record, segment)) WITHOUT ROWID;
CREATE TABLE totals (partition TEXT PRIMARY KEY, entries INTEGER NOT NULL, \
bytes INTEGER NOT NULL) WITHOUT ROWID;
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
    INSERT INTO totals VALUES (new.partition, 0, new.nbytes) \
ON CONFLICT DO UPDATE SET bytes = bytes + new.nbytes; END;
CREATE TRIGGER segment_gone AFTER DELETE ON segments BEGIN
    UPDATE totals SET bytes = bytes - old.nbytes WHERE partition = old.partition; END;
CREATE TRIGGER record_added AFTER INSERT ON records BEGIN
    INSERT INTO totals VALUES (new.partition, 1, new.nbytes)
    ON CONFLICT DO UPDATE SET entries = entries + 1, bytes = bytes + new.nbytes; END;
CREATE TRIGGER record_gone AFTER DELETE ON records BEGIN
    UPDATE totals SET entries = entries - 1, bytes = bytes - old.nbytes \
WHERE partition = old.partition;
    INSERT INTO removed (id) VALUES (old.id); END;
"""


@dataclass(frozen=True)
class SegmentSlice:
    """Rows `start` to `stop - 1` of a prompt, which are the first rows of a segment.

    Attributes
    ----------
    n : int
        Number of the segment.
    name : str
        Name of its object.
    start, stop : int
        Rows of the prompt.
    end : int
        Row after the last one of the segment.
    due : float
        When the segment expires, in seconds since 1970.
    entry_id : str
        Id of the prompt for which the segment was stored.
    """

    n: int
    name: str
    start: int
    stop: int
    end: int
    due: float = NEVER
    entry_id: str = ""


@dataclass(frozen=True)
class EntryRow:
    """An entry's row, its description still encoded."""

    n: int
    id: str
    partition: str
    epoch: str
    about: bytes


class _KnownPrefixes:
    """What a catalog says about some of a prompt's prefixes, each asked once.

    Rows of a prefix are there only if those of all shorter ones are. So a few ends, a stride apart,
    tell between which two the longest prefix ends, and a prompt of any length needs few queries.
    """

    def __init__(self, catalog: "Catalog", keys: PrefixKeys, now: float) -> None:
        self._read, self._keys, self._now = catalog.read, keys, now
        self._rows: dict[bytes, tuple[int, str, int, int, float, str] | None] = {}

    def look(self, ends: Iterable[int]) -> None:
        """Ask about the prefixes with these ends that were not asked about before."""
        new_keys = [key for end in ends if (key := self._keys.prefix_key(end)) not in self._rows]
        self._rows.update(dict.fromkeys(new_keys))
        for offset in range(0, len(new_keys), _KEYS_PER_QUERY):
            key_batch = new_keys[offset : offset + _KEYS_PER_QUERY]
            query = (
                "SELECT b.key, s.n, s.name, s.start, s.stop, s.due, s.record FROM blocks b "
                "JOIN segments s ON s.n = b.n"
                f" WHERE b.key IN ({','.join('?' * len(key_batch))}) AND {alive_condition('s')}"
            )
            values = (*key_batch, self._now, self._now + SKEW)
            self._rows.update({row[0]: row[1:] for row in self._read(query, values)})

    def row(self, end: int) -> tuple[int, str, int, int, float, str] | None:
        """Return number, name, start, stop, due and entry of the segment with a prefix's end."""
        return self._rows.get(self._keys.prefix_key(end))

    def deepest_block(self, top: int) -> int:
        """Return the number of blocks of the longest prefix of whole blocks, at most `top`.

        Rows in it may be missing.
        """
        deepest, begin, strides = 0, _STRIDE, _FIRST_STRIDES
        while begin <= top:
            marks = range(begin, top + 1, _STRIDE)[:strides]
            self.look(mark * BLOCK for mark in marks)
            present = [mark for mark in marks if self.row(mark * BLOCK)]
            deepest = present[-1] if present else deepest
            # Not at any that is missing: a newer segment may have taken names and left with them.
            if deepest + _LARGEST_HOLE * _STRIDE < marks[-1]:
                break
            begin, strides = marks[-1] + _STRIDE, strides * 2

        rest = range(deepest + 1, min(deepest + _STRIDE - 1, top) + 1)
        self.look(block * BLOCK for block in rest)
        return next((block for block in reversed(rest) if self.row(block * BLOCK)), deepest)

    def chain(self, end: int) -> tuple[list[SegmentSlice], int]:
        """Return the slices of a prefix, and 0 or the end before which rows are missing."""
        slices: list[SegmentSlice] = []
        # Backwards from the end: only a segment's own start says where the one before it ends.
        prefix_end, step, ahead = end, BLOCK, 1
        while prefix_end:
            if self._keys.prefix_key(prefix_end) not in self._rows:
                # Segments before it are mostly as long: those of a long chain are asked at once.
                self.look(range(prefix_end, 0, -step)[:ahead])
                ahead *= 2
            row = self.row(prefix_end)
            if row is None:
                return [], prefix_end
            n, name, start, stop, due, entry_id = row
            slices.append(SegmentSlice(n, name, start, prefix_end, stop, due, entry_id))
            prefix_end, step = start, stop - start
        return slices[::-1], 0


class Catalog:
    """The rows of segments and entries. Thread-safe.

    One connection reads and one writes, so that no reader waits for a writer of this or another
    process. Methods that use the database raise `sqlite3.Error`. Functions that change rows take
    the connection of a `transaction`.

    Parameters
    ----------
    path : Path | None
        File of the database; None: in memory.
    noted_damage : Callable[[], None]
        Called when a statement meets damage (see `CatalogConnection`).
    """

    def __init__(
        self, path: Path | None, *, noted_damage: Callable[[], None] = lambda: None
    ) -> None:
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
        self.orphan_names: set[str] = set()
        """Names of segments that may describe prompts without state, as of the last comparison."""

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
        """Commit everything inside, or nothing if it raises. One process writes at a time.

        Parameters
        ----------
        wait : bool
            False: raise at once if another writer is at work.

        Yields
        ------
        sqlite3.Connection
            For the statements of this transaction.
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

            # Less than 0 after the connection was made anew.
            changed = sql.total_changes - self._copied
            # Automatic checkpoints are off: one inside a commit would make that writer wait.
            if not 0 <= changed < _ROWS_PER_CHECKPOINT:
                self._copied = sql.total_changes
                # If it fails, the commit is still safe in the log.
                try:
                    sql.execute("PRAGMA wal_checkpoint(PASSIVE)")
                except sqlite3.Error as error:
                    logger.warning("the log of the catalog cannot be shortened now: %s", error)
                    if is_damage(error):
                        self._noted_damage()

    def read(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with self._reader.use() as sql:
            return sql.execute(query, values).fetchall()

    def empty_log(self) -> None:
        """Write the log back into the catalog and leave nothing in it.

        Raises
        ------
        sqlite3.Error
            If other processes read the log for 10 s, or the catalog cannot be written.
        """
        until = time.monotonic() + _WRITE_SECONDS
        with self._writer.use() as sql:
            # SQLite waits for readers, but not for a checkpoint of another process.
            while sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                if time.monotonic() > until:
                    raise ConnectionBusy(
                        "another process has been reading the catalog for too long"
                    )
                time.sleep(0.01)

    def close(self) -> None:
        """Close both connections for good."""
        self._reader.close()
        self._writer.close()

    # What is there

    def longest_prefix(
        self, keys: PrefixKeys, max_tokens: int, now: float, *, partial_block: bool = True
    ) -> list[SegmentSlice]:
        """Find the longest stored prefix without a gap.

        Parameters
        ----------
        keys : PrefixKeys
            Keys of the prompt.
        max_tokens : int
            Most tokens of the prefix.
        now : float
            Seconds since 1970; expired segments do not count.
        partial_block : bool
            Whether to add rows inside the block where the prompt parts from all others, for prompts
            without media.

        Returns
        -------
        list[SegmentSlice]
            First rows first; empty without a prefix.
        """
        known = _KnownPrefixes(self, keys, now)
        limit = max_tokens
        deepest = known.deepest_block(limit // BLOCK)
        # Only tails behind the deepest full block can be longer.
        tails = [deepest * BLOCK + i for i in range(1, BLOCK) if deepest * BLOCK + i <= max_tokens]
        known.look(tails)
        ends = [*(end for end in reversed(tails) if known.row(end)), deepest * BLOCK]

        # The longest end may lack rows before it (evicted): then the next shorter one is tried.
        while end := ends.pop(0):
            if end <= limit:
                slices, missing = known.chain(end)
                if not missing:
                    return (
                        self._extend_in_block(keys, slices, max_tokens, now)
                        if partial_block and not keys.spans
                        else slices
                    )
                # Every prefix that needs the missing rows is of no use.
                limit = missing - 1
            if not ends:
                ends = [known.deepest_block(limit // BLOCK) * BLOCK]
        return []

    def _extend_in_block(
        self, keys: PrefixKeys, slices: list[SegmentSlice], max_tokens: int, now: float
    ) -> list[SegmentSlice]:
        # No block has a name inside of it, so the rows of the next segments are compared by tokens.
        # A partial last block, or one at the limit, ends here already.
        last = slices[-1]
        end = last.stop
        if end % BLOCK or end >= max_tokens:
            return slices
        query = (
            "SELECT n, name, start, stop, due, record, ids FROM segments WHERE n = ? UNION ALL "
            "SELECT * FROM (SELECT n, name, start,"
            f" stop, due, record, ids FROM segments s WHERE prefix = ? AND {alive_condition('s')} "
            "ORDER BY n DESC LIMIT 4)"
        )

        best, extra = 0, last
        for n, name, start, stop, due, entry_id, ids in self.read(
            query, (last.n, keys.prefix_key(end), now, now + SKEW)
        ):
            # A segment with media has no tokens in the catalog, and so no equal ones.
            limit = end - start + min(max_tokens - end, BLOCK - 1)
            stored_ids = np.frombuffer(ids, "<u4")[end - start : limit]
            same = stored_ids == keys.ids[end : end + len(stored_ids)]
            length = len(same) if same.all() else int(same.argmin())
            if length > best:
                best, extra = (
                    length,
                    SegmentSlice(
                        n, name, max(start, last.start), end + length, stop, due, entry_id
                    ),
                )

        if not best:
            return slices

        if extra.n == last.n:
            return [*slices[:-1], extra]
        return [
            *slices,
            SegmentSlice(
                extra.n, extra.name, end, extra.stop, extra.end, extra.due, extra.entry_id
            ),
        ]

    def chain(
        self, tokens: int, key: bytes, now: float, read: Read | None = None
    ) -> list[SegmentSlice]:
        """Find the slices of a prefix by its key.

        Parameters
        ----------
        tokens : int
            Length of the prefix.
        key : bytes
            Its key.
        now : float
            Seconds since 1970; expired segments do not count.
        read : Read | None
            Runs the queries within a transaction; None: in the connection for reading.

        Returns
        -------
        list[SegmentSlice]
            First rows first; empty if there is a gap.
        """
        query = (
            "SELECT s.n, s.name, s.start, s.stop, s.due, s.record, s.prefix FROM blocks b JOIN "
            "segments s ON s.n = b.n"
            f" WHERE b.key = ? AND {alive_condition('s')}"
        )
        slices: list[SegmentSlice] = []
        while tokens:
            segment_rows = (read or self.read)(query, (key, now, now + SKEW))
            # The block may have been stored anew, in a segment with other rows.
            if not segment_rows or not segment_rows[0][2] < tokens <= segment_rows[0][3]:
                return []
            n, name, start, end, due, entry_id, key = segment_rows[0]
            slices.append(SegmentSlice(n, name, start, tokens, end, due, entry_id))
            tokens = start

        return slices[::-1]

    def slices(self, entry: int) -> list[SegmentSlice]:
        """List the slices of an entry, by its number, first rows first.

        The list is empty if another entry has replaced it.
        """
        # A segment of the kind DESCRIPTION has the description alone, and no rows.
        query = (
            "SELECT s.n, s.name, l.start, l.stop, s.stop, s.due, s.record FROM links l JOIN "
            "segments s ON s.n = l.segment"
            f" WHERE l.record = ? AND s.kind != '{DESCRIPTION}' ORDER BY l.start"
        )
        return [SegmentSlice(*row) for row in self.read(query, (entry,))]

    def sizes(self, slices: Iterable[SegmentSlice]) -> dict[str, int]:
        """Return the bytes of the segments of these slices, by name."""
        query = "SELECT name, nbytes FROM segments WHERE n IN (SELECT value FROM json_each(?))"
        return dict(self.read(query, (json.dumps([segment_slice.n for segment_slice in slices]),)))

    def entry(self, id: str, now: float) -> EntryRow | None:
        """Return the entry with this id; None if it is missing or has expired."""
        query = (
            "SELECT n, id, partition, epoch, about FROM records r WHERE id = ? AND "
            f"{alive_condition('r')}"
        )
        matches = self.read(query, (id, now, now + SKEW))
        return EntryRow(*matches[0]) if matches else None

    def ids_beginning(self, beginning: str, partition: str, epoch: str) -> frozenset[str]:
        """Return the ids of entries that begin so, expired ones included."""
        # A range of the index over ids.
        end = beginning[:-1] + chr(ord(beginning[-1]) + 1)
        query = "SELECT id FROM records WHERE id >= ? AND id < ? AND partition = ? AND epoch = ?"
        return frozenset(id for (id,) in self.read(query, (beginning, end, partition, epoch)))

    def entries(
        self,
        partition: str | None,
        epoch: str | None,
        now: float,
        *,
        after: int = 0,
        page: int = 256,
    ) -> Generator[EntryRow]:
        """Yield the entries with numbers above `after`.

        Parameters
        ----------
        partition, epoch : str | None
            Whose entries; None: all.
        now : float
            Seconds since 1970; expired entries do not count.
        after : int
            Number of the last entry to skip.
        page : int
            Rows of one query. No lock is kept between two queries.
        """
        query = (
            "SELECT n, id, partition, epoch, about FROM records r WHERE n > ?3 AND (?4 IS NULL OR "
            "partition = ?4)"
            f" AND (?5 IS NULL OR epoch = ?5) AND {alive_condition('r', '?1', '?2')} ORDER BY n "
            "LIMIT ?6"
        )

        # By number and not by offset: rows that come or leave meanwhile move no page.
        while True:
            page_rows = self.read(query, (now, now + SKEW, after, partition, epoch, page))
            if not page_rows:
                return
            after = page_rows[-1][0]
            for row in page_rows:
                yield EntryRow(*row)

    def next_due(self) -> float | None:
        """Return when the next entry or segment expires, in seconds since 1970; None: never."""
        query = (
            "SELECT min(due) FROM (SELECT min(due) AS due FROM records WHERE due < 1e18 UNION ALL "
            "SELECT min(due) FROM segments WHERE due < 1e18)"
        )
        return self.read(query)[0][0]

    def totals(self, partition: str | None = None) -> tuple[int, int]:
        """Return the numbers of entries and bytes, of one partition or of all."""
        with self._reader.use() as sql:
            return totals(sql, partition)

    def objects_to_delete(self) -> list[str]:
        """Return the names of objects to delete, until `note_deleted` is called for them."""
        return [
            name for (name,) in self.read("SELECT name FROM leaving") if name not in self._deleted
        ]

    def note_deleted(self, names: Iterable[str]) -> None:
        """Note deleted objects, for the next transaction to strike off."""
        self._deleted.update(names)

    def removed_elsewhere(self) -> tuple[list[tuple[str, bool]], bool]:
        """Return the entries that other processes removed since the last call.

        It is cheap if nothing has changed.

        Returns
        -------
        news : list[tuple[str, bool]]
            Id of each removed entry, and whether an entry with this id was stored again.
        complete : bool
            False if the journal has dropped some of the removals.
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
        # This transaction's own removals are no news from elsewhere. They are marked as seen before
        # the commit, without keeping the readers' lock: until the commit they cannot see them
        # anyway.
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
            query = (
                "SELECT seq, id, id IN (SELECT id FROM records) FROM removed WHERE seq > ? ORDER "
                "BY seq"
            )
            journal_rows = sql.execute(query, (self._seen,)).fetchall()
            if journal_rows:
                # The journal keeps its latest rows alone: a gap in the numbers means missed
                # removals.
                self._complete = self._complete and journal_rows[0][0] == self._seen + 1
                self._seen = journal_rows[-1][0]
                self._news += [(id, bool(back)) for _, id, back in journal_rows]


def reason_of(error: sqlite3.Error) -> str:
    """Return the reason of a failed write, as counted in refusals.

    Returns
    -------
    str
        `full`, `read_only`, `busy` or `error`.
    """
    reasons = {
        sqlite3.SQLITE_FULL: "full",
        sqlite3.SQLITE_READONLY: "read_only",
        sqlite3.SQLITE_BUSY: "busy",
        sqlite3.SQLITE_LOCKED: "busy",
    }
    return reasons.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "error")


def alive_condition(table: str, now: str = "?", latest: str = "?") -> str:
    """Return the SQL condition for entries that have not expired.

    Parameters
    ----------
    table : str
        Name of the table.
    now, latest : str
        Placeholders for the present time, and for the latest time at which an entry can have been
        made.
    """
    return f"({table}.due > {now} AND ({table}.due >= 1e18 OR {table}.created <= {latest}))"


def totals(sql: sqlite3.Connection, partition: str | None) -> tuple[int, int]:
    """Return the numbers of entries and bytes, of one partition or of all."""
    query = (
        "SELECT coalesce(sum(entries), 0), coalesce(sum(bytes), 0) FROM totals WHERE ?1 IS NULL OR "
        "partition = ?1"
    )
    return sql.execute(query, (partition,)).fetchone()


def _last_removed(sql: sqlite3.Connection) -> int:
    return sql.execute("SELECT coalesce(max(seq), 0) FROM removed").fetchone()[0]


def _prepare(sql: sqlite3.Connection) -> None:
    """Create the tables of a new catalog.

    Raises
    ------
    CatalogDamaged
        If an existing catalog is of another version or lacks a table.
    """
    version = sql.execute("PRAGMA user_version").fetchone()[0]
    schema_names = {
        row[0]
        for row in sql.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'trigger')")
    }
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
