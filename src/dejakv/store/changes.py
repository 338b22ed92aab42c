"""Changes of the catalog within a transaction: entries and segments come, are used, and leave.

An entry leaves with the segments that no other entry has all of. A segment leaves with its
entries.
"""

import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from dejakv.store.base import CorruptState, StateInfo, decode_meta
from dejakv.store.budgets import LEAST_SAVING, SKEW, BudgetLimit, NoRoom
from dejakv.store.catalog import Catalog, SegmentSlice, alive_condition, totals
from dejakv.store.counters import StoreCounters, logger
from dejakv.store.prefix_keys import SIZE
from dejakv.store.segment import DESCRIPTION, Segment

Uses = dict[tuple[str, tuple[int, ...]], int]
"""Number of uses by entry (its id) and segments, in the order of the last uses."""
_JOURNAL_ROWS = 10_000
_MAX_USES = 256
_MAX_UNANNOUNCED = 1000


@dataclass
class Removal:
    """Result of a removal.

    Attributes
    ----------
    entries : list[tuple[str, str]]
        Id and partition of each removed entry.
    objects : list[str]
        Names of removed segments, whose objects are deleted after the commit.
    nbytes : int
        Bytes of the entries and segments.
    """

    entries: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    objects: list[str] = field(default_factory=list[str])
    nbytes: int = 0

    def __iadd__(self, other: "Removal") -> "Removal":
        self.entries += other.entries
        self.objects += other.objects
        self.nbytes += other.nbytes
        return self


@dataclass(frozen=True)
class SharedSegment:
    """A segment that leaves although other entries need its first rows.

    Attributes
    ----------
    n : int
        Number of the segment.
    name : str
        Name of its object.
    stop : int
        Row after the last one that the others need.
    entry_id : str
        Id of an entry that has all of these rows.
    """

    n: int
    name: str
    stop: int
    entry_id: str


def add_segment(sql: sqlite3.Connection, segment: Segment) -> int:
    """Index an existing segment, and return its number.

    Of two segments with the same block, the newer one counts.
    """
    partition, epoch, keys, ids = segment.row
    values = (
        segment.name, partition, epoch, segment.kind, segment.start, segment.stop, segment.prefix,
        keys, ids,
        segment.entry_id, segment.nbytes, segment.created, segment.due, _advance_clock(sql),
    )  # fmt: skip
    sql.execute(
        "INSERT INTO segments (name, partition, epoch, kind, start, stop, prefix, keys, ids, "
        "record, nbytes, created, due, used, hits)"
        f" VALUES ({','.join('?' * len(values))}, 0)",
        values,
    )

    n = int(sql.execute("SELECT last_insert_rowid()").fetchone()[0])
    sql.executemany(
        "INSERT OR REPLACE INTO blocks VALUES (?, ?)",
        ((key, n) for key in dict.fromkeys(segment.keys)),
    )
    return n


def add_entry(
    sql: sqlite3.Connection,
    about: bytes,
    columns: tuple[str, str, str, str],
    created: float,
    due: float,
    slices: Sequence[SegmentSlice],
) -> Removal:
    """Add an entry, in place of another with the same id, whose uses it takes over.

    Parameters
    ----------
    sql : sqlite3.Connection
        A transaction.
    about : bytes
        Description, as of `base.encode_meta`.
    columns : tuple[str, str, str, str]
        Id, partition, epoch and kind.
    created, due : float
        When it was made and when it expires, in seconds since 1970.
    slices : Sequence[SegmentSlice]
        The rows it consists of.

    Returns
    -------
    Removal
        Segments that leave with the replaced entry. The entry itself is not listed: its id stays.
    """
    replaced_entry, hits = sql.execute(
        "SELECT n, hits FROM records WHERE id = ?", (columns[0],)
    ).fetchone() or (0, 0)
    query = (
        "SELECT l.segment, s.hits FROM links l JOIN segments s ON s.n = l.segment WHERE l.record = "
        "?"
    )
    replaced_hits = dict(sql.execute(query, (replaced_entry,)).fetchall())

    _delete_entries(sql, [replaced_entry])
    values = (*columns, len(about), created, due, _advance_clock(sql), hits, about)
    sql.execute(
        "INSERT INTO records (id, partition, epoch, kind, nbytes, created, due, used, hits, "
        "about) VALUES (?,?,?,?,?,?,?,?,?,?)",
        values,
    )

    n = sql.execute("SELECT last_insert_rowid()").fetchone()[0]
    sql.executemany(
        "INSERT INTO links VALUES (?, ?, ?, ?)",
        ((n, segment_slice.n, segment_slice.start, segment_slice.stop) for segment_slice in slices),
    )

    # What a prompt has all of is its own text too, and stays as long as it does.
    whole = [
        (due, segment_slice.n)
        for segment_slice in slices
        if segment_slice.stop == segment_slice.end
    ]
    sql.executemany("UPDATE segments SET due = max(due, ?) WHERE n = ?", whole)
    query = "UPDATE segments SET hits = max(hits, ?) WHERE n = ?"
    # Under `lfu` a prompt stored anew would otherwise be the first to leave.
    sql.executemany(
        query,
        ((max(replaced_hits.values(), default=0), segment_slice.n) for segment_slice in slices),
    )

    unlinked = [
        s
        for s in replaced_hits
        if not sql.execute("SELECT 1 FROM links WHERE segment = ?", (s,)).fetchone()
    ]
    return _delete_segments(sql, unlinked)


def touch(sql: sqlite3.Connection, uses: Uses) -> None:
    """Note uses of entries, by id, and of their segments.

    The first segment counts as the last one used, so that the beginning of a prompt is the last to
    leave.
    """
    for (id, chain), hits in uses.items():
        # One step for each segment: with equal times the order among them would be lost.
        clock = _advance_clock(sql, len(chain) + 1)
        # Without an id: a prefix alone, whose prompt has left.
        if id:
            sql.execute(
                "UPDATE records SET used = ?, hits = hits + ? WHERE id = ?", (clock, hits, id)
            )
        query = "UPDATE segments SET used = ?, hits = hits + ? WHERE n = ?"
        sql.executemany(query, [(clock - place, hits, n) for place, n in enumerate(chain)])


def evict(sql: sqlite3.Connection, segments: Iterable[int]) -> Removal:
    """Remove segments and the entries that need them.

    Other segments of these entries stay, as prefixes.
    """
    numbers = list(segments)
    # The entries first: they are found by their links to the segments.
    entries = _linked(sql, "record", "segment", numbers)
    removal = _delete_entries(sql, entries)
    removal += _delete_segments(sql, numbers)
    return removal


def description_segments(sql: sqlite3.Connection, segments: Iterable[int]) -> list[int]:
    """List the segments with the descriptions of prompts that need these segments."""
    linked_segments = set(
        _linked(sql, "segment", "record", _linked(sql, "record", "segment", segments))
    )
    query = "SELECT 1 FROM segments WHERE n = ? AND kind = ?"
    return [n for n in linked_segments if sql.execute(query, (n, DESCRIPTION)).fetchone()]


def remove(
    sql: sqlite3.Connection,
    entries: Iterable[int],
    segments: Iterable[int] = (),
    *,
    tear: bool = True,
) -> Removal:
    """Remove entries with their segments, and segments with their entries.

    A segment of a removed entry stays if another entry has all of it.

    Parameters
    ----------
    sql : sqlite3.Connection
        A transaction.
    entries, segments : Iterable[int]
        Their numbers.
    tear : bool
        Whether entries with only some rows of a leaving segment are removed too (see
        `find_shared_segments`).

    Returns
    -------
    Removal
        All that has left.
    """
    removed_entries, removed_segments = set(entries), set(segments)
    new_entries = set(removed_entries)

    removed_entries |= (linked_entries := set(_linked(sql, "record", "segment", removed_segments)))
    new_entries |= linked_entries
    # Each removed entry frees segments, and each removed segment takes further entries along.
    while new_entries:
        linked_segments = set(_linked(sql, "segment", "record", new_entries)) - removed_segments
        unneeded = {s for s in linked_segments if not is_needed(sql, s, removed_entries)}
        removed_segments |= unneeded
        new_entries = (
            set(_linked(sql, "record", "segment", unneeded)) - removed_entries
            if tear
            else set[int]()
        )
        removed_entries |= new_entries

    removal = _delete_entries(sql, removed_entries)
    removal += _delete_segments(sql, removed_segments)
    return removal


def find_shared_segments(sql: sqlite3.Connection, entries: Collection[int]) -> list[SharedSegment]:
    """List the segments that leave with these entries although others have their first rows."""
    shared_segments: list[SharedSegment] = []
    for s in set(_linked(sql, "segment", "record", entries)):
        if not is_needed(sql, s, entries):
            query = (
                "SELECT l.record, l.stop, r.id FROM links l JOIN records r ON r.n = l.record WHERE "
                "l.segment = ?"
            )
            surviving_links = [
                (stop, id) for entry, stop, id in sql.execute(query, (s,)) if entry not in entries
            ]
            if surviving_links:
                (name,) = sql.execute("SELECT name FROM segments WHERE n = ?", (s,)).fetchone()
                # The longest beginning serves all of them.
                shared_segments.append(SharedSegment(s, name, *max(surviving_links)))

    return shared_segments


def make_room(
    sql: sqlite3.Connection,
    order: str,
    limit: BudgetLimit,
    keep: Collection[int] = (),
    keep_entry: str = "",
) -> Removal:
    """Evict until a limit is met.

    Parameters
    ----------
    sql : sqlite3.Connection
        A transaction.
    order : str
        Columns by which entries and segments are evicted, as in `POLICIES`. Where a limit counts
        snapshots alone, those leave first that save least for their bytes.
    limit : BudgetLimit
        The limit to meet, and whose entries are evicted for it.
    keep : Collection[int]
        Numbers of segments that must stay.
    keep_entry : str
        Id of the entry that must stay.

    Returns
    -------
    Removal
        What was evicted.

    Raises
    ------
    NoRoom
        If the limit of bytes cannot be met without `keep` or `keep_entry`.
    """
    removal = Removal()
    partition, max_bytes, max_entries = limit.partition, limit.max_bytes, limit.max_entries
    in_partition = "(?1 IS NULL OR partition = ?1)"
    # Descriptions of prompts leave with their entry, and not by their own uses.
    unlinked = "NOT EXISTS (SELECT 1 FROM links WHERE segment = segments.n)"
    standalone = f"(kind != '{DESCRIPTION}' OR {unlinked})"
    if limit.kind:
        standalone, order = f"kind = '{limit.kind}'", LEAST_SAVING

    excess = totals(sql, partition)[0] - max_entries if max_entries else 0
    if excess > 0:
        query = f"SELECT n FROM records WHERE {in_partition} AND id != ?2 ORDER BY {order} LIMIT ?3"
        removal += remove(sql, [n for (n,) in sql.execute(query, (partition, keep_entry, excess))])
    while max_bytes and (excess := _limited_bytes(sql, limit) - max_bytes) > 0:
        victims: list[int] = []
        # Whole segments in order of use: a prompt's end leaves before its beginning.
        for n, size in sql.execute(
            f"SELECT n, nbytes FROM segments WHERE {in_partition} AND {standalone} ORDER BY "
            f"{order}",
            (partition,),
        ):
            if excess <= 0:
                break
            if n not in keep:
                victims.append(n)

                # An estimate: the outer loop measures again, and evicts more if this is too much.
                excess -= size + _described_by(sql, n)

        if victims:
            removal += evict(sql, victims + description_segments(sql, victims))
            continue
        if limit.kind:
            raise NoRoom

        # No segment is left to take, so descriptions without state use up the budget.
        query = f"SELECT n FROM records WHERE {in_partition} AND id != ?2 ORDER BY {order} LIMIT 16"
        entries = [n for (n,) in sql.execute(query, (partition, keep_entry))]
        if not entries:
            raise NoRoom
        removal += _delete_entries(sql, entries)

    return removal


def expired(sql: sqlite3.Connection, now: float) -> tuple[list[int], list[int]]:
    """Return the numbers of entries and segments that have expired or come from the future."""
    entries = sql.execute(
        f"SELECT n FROM records r WHERE due < 1e18 AND NOT {alive_condition('r')}",
        (now, now + SKEW),
    )
    expired_entries = [n for (n,) in entries.fetchall()]
    segments = sql.execute(
        f"SELECT n FROM segments s WHERE due < 1e18 AND NOT {alive_condition('s')}",
        (now, now + SKEW),
    )
    return expired_entries, [n for (n,) in segments.fetchall()]


def unneeded_continuations(sql: sqlite3.Connection, segments: Iterable[int]) -> set[int]:
    """Return the segments that continue these and that no entry needs.

    A continuation begins where a segment ends, or inside of it. Continuations of continuations
    count too.
    """
    continuations: set[int] = set()
    waiting = list(segments)
    while waiting:
        row = sql.execute("SELECT keys FROM segments WHERE n = ?", (waiting.pop(),)).fetchone()
        # A continuation may begin at any named prefix inside of a segment.
        for offset in range(0, len(row[0]) if row else 0, SIZE):
            query = (
                "SELECT n FROM segments s WHERE prefix = ? AND NOT EXISTS (SELECT 1 FROM links "
                "WHERE segment = s.n)"
            )
            new = {
                n for (n,) in sql.execute(query, (row[0][offset : offset + SIZE],))
            } - continuations
            # Only new ones wait: otherwise a circle of names would never end.
            continuations |= new
            waiting += new

    return continuations


def has_segment(sql: sqlite3.Connection, segment: int) -> bool:
    """Return whether a segment is in the catalog, by its number."""
    return sql.execute("SELECT 1 FROM segments WHERE n = ?", (segment,)).fetchone() is not None


def is_needed(sql: sqlite3.Connection, segment: int, without: Collection[int]) -> bool:
    """Return whether an entry outside of `without` has all rows of a segment."""
    query = (
        "SELECT l.record FROM links l JOIN segments s ON s.n = l.segment WHERE s.n = ? AND l.stop "
        "= s.stop"
    )
    return any(entry not in without for (entry,) in sql.execute(query, (segment,)))


class PendingNotes:
    """Uses and damage that are noted in batches, so that no reader waits for a writer.

    A killed process loses the last ones. Thread-safe.

    Parameters
    ----------
    catalog : Catalog
        Where they are noted.
    counters : StoreCounters
        Counts damage.
    on_removal : Callable[[Removal], object]
        Called with the removed entries, after the commit.
    lock : threading.Lock
        The store's lock; callers must not hold it.
    shared : bool
        Whether others remove objects without a word to this catalog, so that a missing object is no
        damage.

    Attributes
    ----------
    lost : set[str]
        Ids of entries that need a condemned segment.
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
        self._on_removal = on_removal
        self._lock = lock
        self._shared = shared
        self._uses = Uses()
        self._unannounced: dict[str, None] = {}
        self._condemned: dict[int, str] = {}
        self.lost: set[str] = set()

    def note_use(self, id: str, segments: Sequence[int], *, announce: bool = True) -> None:
        """Note a use of an entry and its segments.

        From 256 notes on, they are written if no other writer is at work.

        Parameters
        ----------
        id : str
            Id of the entry.
        segments : Sequence[int]
            Numbers of its segments, first rows first.
        announce : bool
            Whether to tell other machines; beyond 1,000 ids they are not told.
        """
        with self._lock:
            use = (id, tuple(segments))
            if announce and len(self._unannounced) < _MAX_UNANNOUNCED:
                # Removed first, so that it moves to the end: the order is that of the last uses.
                self._unannounced.pop(id, None)
                self._unannounced[id] = None

            # A dictionary keeps the order of insertion: that of the last uses.
            self._uses[use] = self._uses.pop(use, 0) + 1

            full = len(self._uses) >= _MAX_USES

        if full:
            # Outside of the lock, which `settle` takes itself.
            self.settle(wait=False)

    def drain_unannounced(self) -> list[str]:
        """Take the ids used since the last call, in the order of the last uses."""
        with self._lock:
            unannounced, self._unannounced = self._unannounced, {}
        return list(unannounced)

    def drain_uses(self) -> Uses:
        """Take the uses, to write them in a transaction."""
        with self._lock:
            uses, self._uses = self._uses, {}
        return uses

    def restore_uses(self, uses: Uses) -> None:
        """Put back uses whose transaction failed."""
        with self._lock:
            # The older ones first, then the newer: the order of the last uses stays.
            newer, self._uses = self._uses, uses
            for use, count in newer.items():
                self._uses[use] = self._uses.pop(use, 0) + count

    def note_damage(self, segment: int, reason: str, partition: str | None = None) -> None:
        """Remove a damaged segment, now or when no other process writes."""
        self._condemn(segment, "segment", reason, partition)
        self.settle(wait=False)

    def note_missing(self, segment: int) -> None:
        """Note a segment without an object.

        It counts as damage only if its row is still there at the next `settle`: another process may
        be removing both.
        """
        with self._lock:
            # An empty reason: not counted as damage until `settle` has looked again.
            self._condemned.setdefault(segment, "")
        self.settle(wait=False)

    def decode(self, entry: int, about: bytes) -> StateInfo | None:
        """Decode a description. A damaged one gives None and is removed with the next notes."""
        try:
            return decode_meta(about)
        except CorruptState as error:
            # Negative numbers are entries, positive ones segments.
            self._condemn(-entry, "description", str(error))
            return None

    def note_lost(self, id: str, segments: Iterable[int]) -> None:
        """Hide an entry that needs a condemned segment.

        It stays hidden until it is stored anew, or until all damage is removed.
        """
        with self._lock:
            if any(segment in self._condemned for segment in segments):
                self.lost.add(id)

    def note_stored(self, id: str) -> None:
        """Show an entry again, after it was stored anew."""
        with self._lock:
            self.lost.discard(id)

    def settle(self, *, wait: bool) -> None:
        """Write the uses, and remove what is damaged or missing.

        If the catalog cannot be written, the notes stay for the next call.

        Parameters
        ----------
        wait : bool
            False: only if no other writer is at work.
        """
        # A copy: what is condemned during the transaction waits for the next one.
        uses, condemned = self.drain_uses(), dict(self._condemned)
        if not uses and not condemned:
            return
        try:
            with self._catalog.transaction(wait=wait) as sql:
                touch(sql, uses)
                missing = [
                    n for n, reason in condemned.items() if not reason and has_segment(sql, n)
                ]
                removal = remove(sql, [-n for n in condemned if n < 0])
                removal += evict(sql, [n for n in condemned if n > 0])
        except sqlite3.Error as error:
            self.restore_uses(uses)
            if wait:
                logger.warning("uses and damage cannot be noted: %s", error)
            return

        with self._lock:
            for n in condemned:
                self._condemned.pop(n, None)
            # A lost entry stays hidden until all damage is removed; then the catalog itself is
            # right.
            if not self._condemned:
                self.lost.clear()

        # Machines that share objects remove them without a word: there it is no damage.
        for _ in () if self._shared else missing:
            logger.warning("a segment is removed: its object is missing")
            self._counters.add("corrupt")
        self._on_removal(removal)

    def _condemn(self, number: int, kind: str, reason: str, partition: str | None = None) -> None:
        with self._lock:
            already_condemned = number in self._condemned
            self._condemned[number] = reason

        # Each damage is counted once, however many readers meet it before it is removed.
        if not already_condemned:
            logger.warning("a damaged %s is removed: %s", kind, reason)
            self._counters.add("corrupt", partition)


def _delete_entries(sql: sqlite3.Connection, numbers: Iterable[int]) -> Removal:
    removal = Removal()
    for n in numbers:
        row = sql.execute("SELECT id, partition, nbytes FROM records WHERE n = ?", (n,)).fetchone()
        if row is not None:
            removal.entries.append(row[:2])
            removal.nbytes += row[2]
            sql.execute("DELETE FROM records WHERE n = ?", (n,))
            sql.execute("DELETE FROM links WHERE record = ?", (n,))

    if removal.entries:
        # The journal is bounded: `removed_elsewhere` says `complete=False` to a process that missed
        # removals.
        sql.execute(
            "DELETE FROM removed WHERE seq <= (SELECT max(seq) FROM removed) - ?", (_JOURNAL_ROWS,)
        )

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
            sql.executemany(
                "DELETE FROM blocks WHERE key = ? AND n = ?", [(key, n) for key in keys]
            )
            sql.execute("DELETE FROM segments WHERE n = ?", (n,))
            sql.execute("INSERT OR IGNORE INTO leaving VALUES (?)", row[:1])
            sql.execute("DELETE FROM links WHERE segment = ?", (n,))

    return removal


def _limited_bytes(sql: sqlite3.Connection, limit: BudgetLimit) -> int:
    """Return the bytes that count for a limit."""
    if not limit.kind:
        return totals(sql, limit.partition)[1]
    query = (
        "SELECT coalesce(sum(nbytes), 0) FROM segments WHERE kind = ?1 AND "
        "(?2 IS NULL OR partition = ?2)"
    )
    return sql.execute(query, (limit.kind, limit.partition)).fetchone()[0]


def _described_by(sql: sqlite3.Connection, segment: int) -> int:
    """Return the bytes of the entries that need a segment."""
    query = (
        "SELECT coalesce(sum(r.nbytes), 0) FROM links l JOIN records r ON r.n = l.record WHERE "
        "l.segment = ?"
    )
    return sql.execute(query, (segment,)).fetchone()[0]


def _linked(
    sql: sqlite3.Connection, result_column: str, key_column: str, numbers: Iterable[int]
) -> list[int]:
    return [
        n
        for number in numbers
        for (n,) in sql.execute(
            f"SELECT {result_column} FROM links WHERE {key_column} = ?", (number,)
        )
    ]


def _advance_clock(sql: sqlite3.Connection, by: int = 1) -> int:
    sql.execute("UPDATE clock SET used = used + ?", (by,))
    return sql.execute("SELECT used FROM clock").fetchone()[0]
