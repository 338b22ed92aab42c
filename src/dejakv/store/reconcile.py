"""Brings the rows of a catalog and its objects together: when a store is opened, and of shared objects again and again."""

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from dejakv.store import changes
from dejakv.store.base import KV, ChunkMeta, CorruptChunk
from dejakv.store.budgets import POLICIES, Budget
from dejakv.store.catalog import Catalog, Read, SegmentSlice
from dejakv.store.changes import Removal
from dejakv.store.keys import PrefixKeys
from dejakv.store.objects import ObjectMissing, Objects, StoreUnavailable
from dejakv.store.records import decode_meta
from dejakv.store.remote.feed import Header, Put
from dejakv.store.segment import HEAD, RECORD, Segment, described

_REQUESTS = 16
"""Concurrent reads from a service."""
_LARGE = 512 << 10
"""Bytes of the first read of an object without a header in the feed: most are descriptions of long prompts."""
_LOOSE = (
    f"SELECT name, n FROM segments s WHERE kind = '{RECORD}' AND NOT EXISTS (SELECT 1 FROM links WHERE segment = s.n)"
)

News = tuple[Put, set[str]]
Unlisted = Iterable[tuple[str, Segment | None]]
"""Objects without a row: name and description, None if damaged."""


@dataclass
class CatalogChanges:
    """Result of `reconcile`.

    gone     records, segments and objects to delete
    evicted  partition and exceeded limit of each evicted record
    arrived  ids of newly indexed records
    damaged  number of damaged objects
    untrue   number of announced headers without such an object
    """

    gone: Removal
    evicted: list[tuple[str, str]]
    arrived: list[str]
    damaged: int
    untrue: int


def reconcile(
    objects: Objects,
    catalog: Catalog,
    budget: Budget,
    now: float,
    news: News | None = None,
    buried: Callable[[Iterable[Segment]], set[str]] | None = None,
) -> CatalogChanges:
    """Make the catalog agree with the objects: index those without a row, drop rows without an object, remove what has expired, and meet
    the budget. The caller deletes the objects in `CatalogChanges.gone`.

    now     seconds since the epoch
    news    objects put (with headers) and removed, of a shared store; None: they are listed
    buried  names the objects among these that a purge takes

    An object that cannot be read now stays. One that another process is about to index may be indexed or removed: it sees that in its own
    transaction, and tries again. Raises: sqlite3.Error; Unknown if objects cannot be listed.
    """
    damaged = 0
    comparison: tuple[list[int], Unlisted] | None = None
    announced = {
        name: _fitting(name, header) for name, header in (news[0] if news else {}).items() if header is not None
    }
    if objects.shared:  # nobody waits for a service's answers
        comparison = _shared(
            objects, catalog, news, {name: item for name, item in announced.items() if item is not None}
        )
    # Listed before the transaction: what is written meanwhile has its row already then.
    present = set[str]() if comparison else set(objects.list())

    with catalog.transaction() as sql:
        lost, unlisted = comparison or _local(objects, present, sql)
        # Another machine may have cut their state anew: such prompts are looked for once more.
        (last,) = sql.execute("SELECT coalesce(max(n), 0) FROM records").fetchone()
        reread = [_read_again(sql, n) for n in set(changes.descriptions(sql, lost)).difference(lost)]
        catalog.loose |= {item[0] for item in reread if item is not None}
        removal, unlisted = changes.evict(sql, lost), list(unlisted)
        # What another machine was storing while a purge ran.
        purged = buried(segment for _, segment in unlisted if segment is not None) if buried else set[str]()

        for name, segment in (*unlisted, *filter(None, reread)):
            if name in purged:
                sql.execute("INSERT OR IGNORE INTO leaving VALUES (?)", (name,))
                continue
            try:
                if segment is None:
                    raise CorruptChunk("it is damaged")
                removal += _index(sql, catalog, name, segment, now)
            except CorruptChunk:
                damaged += 1
                sql.execute("INSERT OR IGNORE INTO leaving VALUES (?)", (name,))

        arrived = {id for (id,) in sql.execute("SELECT id FROM records WHERE n > ?", (last,))}
        removed_ids = {id for id, _ in removal.records}
        removal.records = [item for item in removal.records if item[0] not in arrived]
        arrived -= removed_ids  # found again: nothing has changed
        removal += changes.remove(sql, *changes.expired(sql, now))
        evictions = changes.make_room(sql, POLICIES[budget.policy], budget.max_bytes, budget.max_entries)
        removal += evictions
        # Also what a process that was killed after its commit did not delete.
        removal.objects += [name for (name,) in sql.execute("SELECT name FROM leaving")]
    limit = "bytes" if budget.max_bytes else "entries"
    arrived -= {id for id, _ in removal.records}
    evicted = [(partition, limit) for _, partition in evictions.records]
    return CatalogChanges(removal, evicted, sorted(arrived), damaged, sum(item is None for item in announced.values()))


def is_there(objects: Objects, name: str) -> bool:
    """Whether an object exists; True if that cannot be told."""
    try:
        # A few bytes suffice to see that it is there.
        objects.head(name, 8)
    except ObjectMissing:
        return False
    except (StoreUnavailable, CorruptChunk):
        return True
    return True


def _local(objects: Objects, present: set[str], sql: sqlite3.Connection) -> tuple[list[int], Unlisted]:
    """Numbers of rows without an object, and objects without a row, which no other process removes within this transaction."""
    rows = dict(sql.execute("SELECT name, n FROM segments"))
    # Looked at again: what was written since the listing has its row already.
    lost = [n for name, n in rows.items() if name not in present and not is_there(objects, name)]
    present -= rows.keys() | {name for (name,) in sql.execute("SELECT name FROM leaving")}
    return lost, filter(None, map(partial(_described, objects), present))


def _shared(
    objects: Objects, catalog: Catalog, news: News | None, announced: Mapping[str, Segment]
) -> tuple[list[int], Unlisted]:
    """As `_local`, outside of a transaction: a row older than the listing whose object is not listed has left. `announced`: known
    descriptions."""
    # Rows first, then the listing: so a missing object had a row that was older.
    if news is None:
        rows, present = dict(catalog.read("SELECT name, n FROM segments")), set(objects.list())
        orphans, missing_names = dict(catalog.read(_LOOSE)).keys(), rows.keys() - present
    else:
        put, removed = news[0].keys(), news[1]
        rows = _named(catalog, "SELECT name, n FROM segments WHERE", put | removed)
        orphans = _named(catalog, f"{_LOOSE} AND", catalog.loose).keys()
        present, missing_names = put | orphans, rows.keys() & removed

    lost = [rows[name] for name in missing_names]
    # Descriptions that came before the state of their prompts are read once more.
    new = present - rows.keys() | orphans & present
    new -= _named(catalog, "SELECT name, 1 FROM leaving WHERE", new).keys()
    catalog.loose = orphans | new
    descriptions: list[tuple[str, Segment | None]] = [(name, announced[name]) for name in announced.keys() & new]

    if unread := new - announced.keys():
        with ThreadPoolExecutor(_REQUESTS) as threads:
            descriptions += filter(
                None, threads.map(partial(_described, objects, first=_LARGE if news else HEAD), unread)
            )
    # State before descriptions of it, and the oldest first: as they were last used, as far as it is known.
    return lost, sorted(descriptions, key=lambda one: (one[1].kind != KV, one[1].created) if one[1] else (True, 0.0))


def _fitting(name: str, header: Header) -> Segment | None:
    """The description in a header that was told; None if it is damaged, or another object's."""
    with suppress(CorruptChunk):
        segment = described(lambda _: header)[0]
        return segment if segment.name == name else None
    return None


def _named(catalog: Catalog, query: str, names: Iterable[str]) -> dict[str, int]:
    """The rows with these names; `query` ends where a condition may follow."""
    return dict(catalog.read(f"{query} name IN (SELECT value FROM json_each(?))", [json.dumps(list(names))]))


def _described(objects: Objects, name: str, first: int = HEAD) -> tuple[str, Segment | None] | None:
    try:
        return name, described(partial(objects.head, name), first)[0]
    except CorruptChunk:
        return name, None
    except (ObjectMissing, StoreUnavailable):
        return None


def _read_again(sql: sqlite3.Connection, number: int) -> tuple[str, Segment] | None:
    """The segment of a description, rebuilt from its record; None for a damaged one."""
    query = (
        "SELECT s.name, s.partition, s.epoch, r.created, r.about FROM segments s JOIN links l ON l.segment = s.n"
        " JOIN records r ON r.n = l.record WHERE s.n = ?"
    )
    name, partition, epoch, created, about = sql.execute(query, (number,)).fetchone()
    try:
        meta = decode_meta(about)
    except CorruptChunk:
        return None

    return name, Segment(
        name, partition, epoch, RECORD, 0, 0, record=meta.id, created=created, ttl=meta.ttl, about=about
    )


def _index(sql: sqlite3.Connection, catalog: Catalog, name: str, segment: Segment, now: float) -> Removal:
    """Add the row of an object, and its record if the object describes one; return what leaves for it. Raises: CorruptChunk"""
    if segment.name != name:
        raise CorruptChunk("it is another one")
    row = sql.execute("SELECT n FROM segments WHERE name = ?", (name,)).fetchone()
    if sql.execute("SELECT 1 FROM leaving WHERE name = ?", (name,)).fetchone():
        return Removal()

    meta = decode_meta(segment.about) if segment.about else None
    if meta is None:
        if row is None:
            changes.add_segment(sql, segment)
        return Removal()

    if _is_older(sql, meta, name):
        sql.execute("INSERT OR IGNORE INTO leaving VALUES (?)", (name,))
        return changes.evict(sql, row or ())
    object_slice = SegmentSlice(
        row[0] if row else changes.add_segment(sql, segment), name, segment.start, segment.stop, segment.stop
    )
    slices = [object_slice]
    if segment.kind == RECORD:
        keys = PrefixKeys(meta.partition, meta.epoch, meta.token_ids, meta.spans)
        read: Read = lambda query, values: sql.execute(query, values).fetchall()  # noqa: E731
        chain = catalog.chain(len(keys), keys.at(len(keys)), now, read)
        # Its rows are not here yet: it is noted, and looked at again with the next news.
        if not chain:
            return Removal()
        slices = [*chain, object_slice]
    columns = (meta.id, meta.partition, meta.epoch, meta.kind)
    return changes.add_record(sql, segment.about, columns, segment.created, segment.due, slices)


def _is_older(sql: sqlite3.Connection, meta: ChunkMeta, name: str) -> bool:
    """Whether another object with the same description is preferred. All replicas choose alike."""
    query = (
        "SELECT r.created, max(s.name) FROM records r JOIN links l ON l.record = r.n JOIN segments s ON s.n = l.segment"
        f" WHERE r.id = ? AND s.kind != '{KV}' AND s.name != ?"  # a put may have indexed it meanwhile
    )
    created, newest_name = sql.execute(query, (meta.id, name)).fetchone()
    return newest_name is not None and (created, newest_name) >= (meta.created, name)
