"""Changes of the catalog, each within a `Catalog.transaction`: records and segments come, are used, and leave.

A record leaves with the segments that no other record has all of. A segment leaves with its records.
"""

import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from dejakv.store.base import ChunkMeta, CorruptChunk
from dejakv.store.budgets import SKEW, NoRoom
from dejakv.store.catalog import Catalog, SegmentSlice, alive, totals
from dejakv.store.counters import StoreCounters, logger
from dejakv.store.keys import SIZE
from dejakv.store.records import decode_meta
from dejakv.store.segment import RECORD, Segment

Uses = dict[tuple[str, tuple[int, ...]], int]
"""How often records (by id) and their segments were used, in the order of the last uses."""
_JOURNAL_ROWS = 10_000
_MOST_USES = 256
_MOST_UNTOLD = 1000


@dataclass
class Removal:
    """What a transaction removes: records as (id, partition), and names of segments, whose objects leave after it."""

    records: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    objects: list[str] = field(default_factory=list[str])
    nbytes: int = 0

    def __iadd__(self, other: "Removal") -> "Removal":
        self.records += other.records
        self.objects += other.objects
        self.nbytes += other.nbytes
        return self


@dataclass(frozen=True)
class SharedSegment:
    """Segment number `n`, whose rows up to `stop` other records need. `record`: id of one that has all of these."""

    n: int
    name: str
    stop: int
    record: str


def add_segment(sql: sqlite3.Connection, segment: Segment) -> int:
    """Index an existing segment and return its number. Of two with the same block, the newer counts."""
    partition, epoch, keys, ids = segment.row
    values = (
        segment.name, partition, epoch, segment.kind, segment.start, segment.stop, segment.prefix, keys, ids,
        segment.record, segment.nbytes, segment.created, segment.due, _tick(sql),
    )  # fmt: skip
    sql.execute(
        "INSERT INTO segments (name, partition, epoch, kind, start, stop, prefix, keys, ids, record, nbytes, created, due, used,"
        f" hits) VALUES ({','.join('?' * len(values))}, 0)",
        values,
    )

    n = int(sql.execute("SELECT last_insert_rowid()").fetchone()[0])
    sql.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?)", ((key, n) for key in dict.fromkeys(segment.keys)))
    return n


def add_record(
    sql: sqlite3.Connection,
    about: bytes,
    columns: tuple[str, str, str, str],
    created: float,
    due: float,
    slices: Sequence[SegmentSlice],
) -> Removal:
    """Add the record (id, partition, epoch, kind) of these pieces. Returns what leaves with the record that it replaces, whose uses it
    takes over."""
    replaced_record, hits = sql.execute("SELECT n, hits FROM records WHERE id = ?", (columns[0],)).fetchone() or (0, 0)
    query = "SELECT l.segment, s.hits FROM links l JOIN segments s ON s.n = l.segment WHERE l.record = ?"
    replaced_hits = dict(sql.execute(query, (replaced_record,)).fetchall())

    _delete_records(sql, [replaced_record])
    values = (*columns, len(about), created, due, _tick(sql), hits, about)
    sql.execute(
        "INSERT INTO records (id, partition, epoch, kind, nbytes, created, due, used, hits, about) VALUES (?,?,?,?,?,?,?,?,?,?)",
        values,
    )

    n = sql.execute("SELECT last_insert_rowid()").fetchone()[0]
    sql.executemany(
        "INSERT INTO links VALUES (?, ?, ?, ?)",
        ((n, segment_slice.n, segment_slice.start, segment_slice.stop) for segment_slice in slices),
    )
    # What a prompt has all of is its own text too, and stays as long as it does.
    whole = [(due, segment_slice.n) for segment_slice in slices if segment_slice.stop == segment_slice.end]
    sql.executemany("UPDATE segments SET due = max(due, ?) WHERE n = ?", whole)
    query = "UPDATE segments SET hits = max(hits, ?) WHERE n = ?"
    # Under `lfu` a prompt stored anew would otherwise be the first to leave.
    sql.executemany(query, ((max(replaced_hits.values(), default=0), segment_slice.n) for segment_slice in slices))
    unlinked = [s for s in replaced_hits if not sql.execute("SELECT 1 FROM links WHERE segment = ?", (s,)).fetchone()]
    return _delete_segments(sql, unlinked)


def touch(sql: sqlite3.Connection, uses: Uses) -> None:
    """Notes uses of records, by id, and of their segments: the end first, so that the beginning is the last to leave."""
    for (id, chain), hits in uses.items():
        # One step for each segment: with equal times the order among them would be lost.
        clock = _tick(sql, len(chain) + 1)
        # Without an id: a prefix alone, whose prompt has left.
        if id:
            sql.execute("UPDATE records SET used = ?, hits = hits + ? WHERE id = ?", (clock, hits, id))
        query = "UPDATE segments SET used = ?, hits = hits + ? WHERE n = ?"
        sql.executemany(query, [(clock - place, hits, n) for place, n in enumerate(chain)])


def evict(sql: sqlite3.Connection, segments: Iterable[int]) -> Removal:
    """Removes segments and the records that need them; other segments of these stay, as prefixes."""
    numbers = list(segments)
    records = _linked(sql, "record", "segment", numbers)
    removal = _delete_records(sql, records)
    removal += _delete_segments(sql, numbers)
    return removal


def descriptions(sql: sqlite3.Connection, segments: Iterable[int]) -> list[int]:
    """Segments with the descriptions of prompts that need these segments."""
    linked_segments = set(_linked(sql, "segment", "record", _linked(sql, "record", "segment", segments)))
    query = "SELECT 1 FROM segments WHERE n = ? AND kind = ?"
    return [n for n in linked_segments if sql.execute(query, (n, RECORD)).fetchone()]


def remove(
    sql: sqlite3.Connection, records: Iterable[int], segments: Iterable[int] = (), *, tear: bool = True
) -> Removal:
    """Remove records with their segments, except segments that other records have all of; and segments with their records. Records that had
    some rows of these are removed too (see `torn`), unless `tear` is False."""
    removed_records, removed_segments = set(records), set(segments)
    new_records = set(removed_records)

    removed_records |= (linked_records := set(_linked(sql, "record", "segment", removed_segments)))
    new_records |= linked_records
    # Each removed record frees segments, and each removed segment takes further records along.
    while new_records:
        linked_segments = set(_linked(sql, "segment", "record", new_records)) - removed_segments
        unneeded = {s for s in linked_segments if not needed(sql, s, removed_records)}
        removed_segments |= unneeded
        new_records = set(_linked(sql, "record", "segment", unneeded)) - removed_records if tear else set[int]()
        removed_records |= new_records
    removal = _delete_records(sql, removed_records)
    removal += _delete_segments(sql, removed_segments)
    return removal


def torn(sql: sqlite3.Connection, records: Collection[int]) -> list[SharedSegment]:
    """Segments that leave with these records although others have their first rows."""
    shared_segments: list[SharedSegment] = []
    for s in set(_linked(sql, "segment", "record", records)):
        if not needed(sql, s, records):
            query = "SELECT l.record, l.stop, r.id FROM links l JOIN records r ON r.n = l.record WHERE l.segment = ?"
            surviving_links = [(stop, id) for record, stop, id in sql.execute(query, (s,)) if record not in records]
            if surviving_links:
                (name,) = sql.execute("SELECT name FROM segments WHERE n = ?", (s,)).fetchone()
                # The longest beginning serves all of them.
                shared_segments.append(SharedSegment(s, name, *max(surviving_links)))
    return shared_segments


def make_room(
    sql: sqlite3.Connection,
    order: str,
    max_bytes: int,
    max_entries: int,
    partition: str | None = None,
    keep: Collection[int] = (),
    keep_record: str = "",
) -> Removal:
    """Evict until a budget is met. Raises: NoRoom if `keep` or `keep_record` would have to leave."""
    removal = Removal()
    in_partition = "(?1 IS NULL OR partition = ?1)"
    standalone = f"(kind != '{RECORD}' OR NOT EXISTS (SELECT 1 FROM links WHERE segment = segments.n))"  # others leave with their record

    excess = totals(sql, partition)[0] - max_entries if max_entries else 0
    if excess > 0:
        query = f"SELECT n FROM records WHERE {in_partition} AND id != ?2 ORDER BY {order} LIMIT ?3"
        removal += remove(sql, [n for (n,) in sql.execute(query, (partition, keep_record, excess))])
    while max_bytes and (excess := totals(sql, partition)[1] - max_bytes) > 0:
        victims: list[int] = []
        # Whole segments in order of use: a prompt's end leaves before its beginning.
        for n, size in sql.execute(
            f"SELECT n, nbytes FROM segments WHERE {in_partition} AND {standalone} ORDER BY {order}", (partition,)
        ):
            if excess <= 0:
                break
            if n not in keep:
                victims.append(n)
                # An estimate: the loop outside measures again, and goes on if it was too much.
                excess -= size + _described_by(sql, n)
        if victims:
            removal += evict(sql, victims + descriptions(sql, victims))
            continue
        # No segment is left to take, so descriptions without state use up the budget.
        query = f"SELECT n FROM records WHERE {in_partition} AND id != ?2 ORDER BY {order} LIMIT 16"
        records = [n for (n,) in sql.execute(query, (partition, keep_record))]
        if not records:
            raise NoRoom
        removal += _delete_records(sql, records)

    return removal


def expired(sql: sqlite3.Connection, now: float) -> tuple[list[int], list[int]]:
    """Records and segments whose time is over, or that come from the future."""
    records = sql.execute(f"SELECT n FROM records r WHERE due < 1e18 AND NOT {alive('r')}", (now, now + SKEW))
    expired_records = [n for (n,) in records.fetchall()]
    segments = sql.execute(f"SELECT n FROM segments s WHERE due < 1e18 AND NOT {alive('s')}", (now, now + SKEW))
    return expired_records, [n for (n,) in segments.fetchall()]


def below(sql: sqlite3.Connection, segments: Iterable[int]) -> set[int]:
    """Segments that begin where these end, or inside of them, and their own continuations, without those that records need."""
    continuations: set[int] = set()
    waiting = list(segments)
    while waiting:
        row = sql.execute("SELECT keys FROM segments WHERE n = ?", (waiting.pop(),)).fetchone()
        # A continuation may begin at any named prefix inside of a segment.
        for offset in range(0, len(row[0]) if row else 0, SIZE):
            query = "SELECT n FROM segments s WHERE prefix = ? AND NOT EXISTS (SELECT 1 FROM links WHERE segment = s.n)"
            new = {n for (n,) in sql.execute(query, (row[0][offset : offset + SIZE],))} - continuations
            continuations |= new
            waiting += new

    return continuations


def is_there(sql: sqlite3.Connection, segment: int) -> bool:
    return sql.execute("SELECT 1 FROM segments WHERE n = ?", (segment,)).fetchone() is not None


def needed(sql: sqlite3.Connection, segment: int, without: Collection[int]) -> bool:
    """Whether another record has all rows of a segment."""
    query = "SELECT l.record FROM links l JOIN segments s ON s.n = l.segment WHERE s.n = ? AND l.stop = s.stop"
    return any(record not in without for (record,) in sql.execute(query, (segment,)))


class PendingNotes:
    """Notes uses and damage in batches, so that reading waits for no writer: a killed process loses the last ones. Thread-safe.

    on_removal    called with the removed entries, after the commit
    shared  whether others remove objects without a word to this catalog, so that a missing one is no damage
    """

    def __init__(
        self,
        catalog: Catalog,
        counters: StoreCounters,
        on_removal: Callable[[Removal], object],
        lock: threading.Lock,
        shared: bool,
    ) -> None:
        self._catalog = catalog
        self._counters = counters
        self._left = on_removal
        self._lock = lock
        self._shared = shared
        self._uses = Uses()
        self._untold: dict[str, None] = {}
        self._condemned: dict[int, str] = {}
        self.lost: set[str] = set()

    def used(self, id: str, segments: Sequence[int], *, announce: bool = True) -> None:
        """Note a use of a record and its segments. `announce`: tell other machines."""
        with self._lock:
            use = (id, tuple(segments))
            if announce and len(self._untold) < _MOST_UNTOLD:
                # Removed first, so that it moves to the end: the order is that of the last uses.
                self._untold.pop(id, None)
                self._untold[id] = None
            # A dictionary keeps the order of insertion: that of the last uses.
            self._uses[use] = self._uses.pop(use, 0) + 1

            full = len(self._uses) >= _MOST_USES
        if full:
            # Outside of the lock, which `settle` takes itself.
            self.settle(wait=False)

    def take_untold(self) -> list[str]:
        """Ids used since the last call, in the order of the last uses."""
        with self._lock:
            unannounced, self._untold = self._untold, {}
        return list(unannounced)

    def take_uses(self) -> Uses:
        """Take the uses, to write them in a transaction."""
        with self._lock:
            uses, self._uses = self._uses, {}
        return uses

    def put_back(self, uses: Uses) -> None:
        """Keeps uses whose transaction failed."""
        with self._lock:
            # The older ones first, then the newer: the order of the last uses stays.
            newer, self._uses = self._uses, uses
            for use, count in newer.items():
                self._uses[use] = self._uses.pop(use, 0) + count

    def damaged(self, segment: int, reason: str, partition: str | None = None) -> None:
        """Removes a damaged segment, now or when nobody else writes."""
        self._condemn(segment, "segment", reason, partition)
        self.settle(wait=False)

    def missing(self, segment: int) -> None:
        """Note a segment without an object. It is counted only if its row is still there then: another process may be removing both."""
        with self._lock:
            # An empty reason: not counted as damage until `settle` has looked again.
            self._condemned.setdefault(segment, "")
        self.settle(wait=False)

    def decoded(self, record: int, about: bytes) -> ChunkMeta | None:
        """A description; None for a damaged one, which is removed with the next notes."""
        try:
            return decode_meta(about)
        except CorruptChunk as error:
            # Negative numbers are records, positive ones segments.
            self._condemn(-record, "description", str(error))
            return None

    def lose(self, id: str, segments: Iterable[int]) -> None:
        """Count a record as lost that needs a condemned segment, until another replaces it."""
        with self._lock:
            if any(segment in self._condemned for segment in segments):
                self.lost.add(id)

    def found(self, id: str) -> None:
        with self._lock:
            self.lost.discard(id)

    def settle(self, *, wait: bool) -> None:
        """Write the notes. Without `wait` only if nobody else writes."""
        # A copy: what is condemned during the transaction waits for the next one.
        uses, condemned = self.take_uses(), dict(self._condemned)
        if not uses and not condemned:
            return
        try:
            with self._catalog.transaction(wait=wait) as sql:
                touch(sql, uses)
                missing = [n for n, reason in condemned.items() if not reason and is_there(sql, n)]
                removal = remove(sql, [-n for n in condemned if n < 0])
                removal += evict(sql, [n for n in condemned if n > 0])
        except sqlite3.Error as error:
            self.put_back(uses)
            if wait:
                logger.warning("uses and damage cannot be noted: %s", error)
            return

        with self._lock:
            for n in condemned:
                self._condemned.pop(n, None)
            # A lost record stays hidden until all damage is removed; then the catalog itself is right.
            if not self._condemned:
                self.lost.clear()

        for _ in () if self._shared else missing:
            logger.warning("a segment is removed: its object is missing")
            self._counters.add("corrupt")
        self._left(removal)

    def _condemn(self, number: int, kind: str, reason: str, partition: str | None = None) -> None:
        with self._lock:
            already_condemned = number in self._condemned
            self._condemned[number] = reason
        if not already_condemned:
            logger.warning("a damaged %s is removed: %s", kind, reason)
            self._counters.add("corrupt", partition)


def _delete_records(sql: sqlite3.Connection, numbers: Iterable[int]) -> Removal:
    removal = Removal()
    for n in numbers:
        row = sql.execute("SELECT id, partition, nbytes FROM records WHERE n = ?", (n,)).fetchone()
        if row is not None:
            removal.records.append(row[:2])
            removal.nbytes += row[2]
            sql.execute("DELETE FROM records WHERE n = ?", (n,))
            sql.execute("DELETE FROM links WHERE record = ?", (n,))
    if removal.records:
        # The journal is bounded: who has missed more rebuilds its index (`removed_elsewhere`).
        sql.execute("DELETE FROM removed WHERE seq <= (SELECT max(seq) FROM removed) - ?", (_JOURNAL_ROWS,))
    return removal


def _delete_segments(sql: sqlite3.Connection, numbers: Iterable[int]) -> Removal:
    removal = Removal()
    for n in numbers:
        row = sql.execute("SELECT name, keys, nbytes FROM segments WHERE n = ?", (n,)).fetchone()
        if row is not None:
            removal.objects.append(row[0])
            removal.nbytes += row[2]
            keys = [row[1][offset : offset + SIZE] for offset in range(0, len(row[1]), SIZE)]
            # Only its own: a newer segment may have taken over the name of a block.
            sql.executemany("DELETE FROM blocks WHERE key = ? AND n = ?", [(key, n) for key in keys])
            sql.execute("DELETE FROM segments WHERE n = ?", (n,))
            sql.execute("INSERT OR IGNORE INTO leaving VALUES (?)", row[:1])
            sql.execute("DELETE FROM links WHERE segment = ?", (n,))

    return removal


def _described_by(sql: sqlite3.Connection, segment: int) -> int:
    """Bytes of the records that need a segment."""
    query = "SELECT coalesce(sum(r.nbytes), 0) FROM links l JOIN records r ON r.n = l.record WHERE l.segment = ?"
    return sql.execute(query, (segment,)).fetchone()[0]


def _linked(sql: sqlite3.Connection, result_column: str, key_column: str, numbers: Iterable[int]) -> list[int]:
    return [
        n
        for number in numbers
        for (n,) in sql.execute(f"SELECT {result_column} FROM links WHERE {key_column} = ?", (number,))
    ]


def _tick(sql: sqlite3.Connection, by: int = 1) -> int:
    sql.execute("UPDATE clock SET used = used + ?", (by,))
    return sql.execute("SELECT used FROM clock").fetchone()[0]
