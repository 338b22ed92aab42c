"""Comparison of a catalog with its objects: at opening, and of shared objects again and again."""

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from dejakv.store import changes
from dejakv.store.base import KV, CorruptState, StateInfo, decode_meta
from dejakv.store.budgets import POLICIES, Budget
from dejakv.store.catalog import Catalog, Read, SegmentSlice
from dejakv.store.changes import Removal
from dejakv.store.objects import ObjectMissing, Objects, StoreUnavailable
from dejakv.store.prefix_keys import PrefixKeys
from dejakv.store.remote.feed import Header, Put
from dejakv.store.segment import DESCRIPTION, HEAD, Segment, read_description

_REQUESTS = 16
"""Concurrent reads from a service."""
_LARGE = 512 << 10
"""Bytes of the first read of an object without a header in the feed.

Most of these objects are descriptions of long prompts.
"""
_ORPHANS = (
    f"SELECT name, n FROM segments s WHERE kind = '{DESCRIPTION}' AND NOT EXISTS (SELECT 1 FROM "
    "links WHERE segment = s.n)"
)

News = tuple[Put, set[str]]
"""Objects put, and names of objects removed, since the last comparison."""
Unlisted = Iterable[tuple[str, Segment | None]]
"""Objects without a row: name and description, None if damaged."""


@dataclass
class CatalogChanges:
    """Result of `reconcile`.

    Attributes
    ----------
    removal : Removal
        Entries and segments that have left, and objects to delete.
    evicted : list[tuple[str, str]]
        Partition and exceeded limit of each evicted entry.
    arrived : list[str]
        Ids of newly indexed entries.
    damaged : int
        Number of damaged objects.
    untrue : int
        Number of announced headers that do not fit their objects.
    """

    removal: Removal
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
    """Make the catalog agree with the objects.

    Objects without a row are indexed, rows without an object are dropped, expired entries are
    removed, and the budget of all partitions together is met. The caller deletes the objects in
    `CatalogChanges.removal`.

    An object that cannot be read now stays. One that another process is about to index may be
    indexed or removed here: that process sees it in its own transaction, and tries again.

    Parameters
    ----------
    objects : Objects
        The objects.
    catalog : Catalog
        Their rows.
    budget : Budget
        Limits of the store.
    now : float
        Seconds since 1970.
    news : News | None
        Objects put (with headers) and removed, of a shared store; None: all objects are listed.
    buried : Callable[[Iterable[Segment]], set[str]] | None
        Returns the names of those segments that a purge takes.

    Raises
    ------
    sqlite3.Error
        If the catalog cannot be written.
    StoreUnavailable
        If the objects cannot be listed.
    """
    damaged = 0
    comparison: tuple[list[int], Unlisted] | None = None
    announced = {
        name: _decode_header(name, header)
        for name, header in (news[0] if news else {}).items()
        if header is not None
    }

    # Outside of the transaction, so that no lookup waits for a service's answers.
    if objects.shared:
        true_headers = {name: item for name, item in announced.items() if item is not None}
        comparison = _compare_shared(objects, catalog, news, true_headers)

    # Listed before the transaction: what is written meanwhile has its row already then.
    present = set[str]() if comparison else set(objects.list())

    with catalog.transaction() as sql:
        lost, unlisted = comparison or _compare_local(objects, present, sql)
        # Another machine may have cut their state anew: such prompts are looked for once more.
        (last,) = sql.execute("SELECT coalesce(max(n), 0) FROM records").fetchone()
        reread = [
            _read_again(sql, n)
            for n in set(changes.description_segments(sql, lost)).difference(lost)
        ]
        catalog.orphan_names |= {item[0] for item in reread if item is not None}

        removal, unlisted = changes.evict(sql, lost), list(unlisted)
        # What another machine was storing while a purge ran.
        purged = (
            buried(segment for _, segment in unlisted if segment is not None)
            if buried
            else set[str]()
        )

        for name, segment in (*unlisted, *filter(None, reread)):
            if name in purged:
                sql.execute("INSERT OR IGNORE INTO leaving VALUES (?)", (name,))
                continue
            try:
                if segment is None:
                    raise CorruptState("it is damaged")
                removal += _index(sql, catalog, name, segment, now)
            except CorruptState:
                damaged += 1
                sql.execute("INSERT OR IGNORE INTO leaving VALUES (?)", (name,))

        arrived = {id for (id,) in sql.execute("SELECT id FROM records WHERE n > ?", (last,))}
        removed_ids = {id for id, _ in removal.entries}
        removal.entries = [item for item in removal.entries if item[0] not in arrived]
        # Removed and indexed again: nothing has changed for those who listen.
        arrived -= removed_ids
        removal += changes.remove(sql, *changes.expired(sql, now))

        evicted = list[tuple[str, str]]()
        for limit in budget.shared_limits():
            room = changes.make_room(sql, POLICIES[budget.policy], limit)
            evicted += [(partition, limit.reason) for _, partition in room.entries]
            removal += room
        # Also what a process that was killed after its commit did not delete.
        removal.objects += [name for (name,) in sql.execute("SELECT name FROM leaving")]

    arrived -= {id for id, _ in removal.entries}
    return CatalogChanges(
        removal, evicted, sorted(arrived), damaged, sum(item is None for item in announced.values())
    )


def object_exists(objects: Objects, name: str) -> bool:
    """Return whether an object exists; True if that cannot be told."""
    try:
        # A few bytes suffice to see that it is there.
        objects.head(name, 8)
    except ObjectMissing:
        return False
    except (StoreUnavailable, CorruptState):
        return True
    return True


def _compare_local(
    objects: Objects, present: set[str], sql: sqlite3.Connection
) -> tuple[list[int], Unlisted]:
    """Find rows without an object and objects without a row.

    It runs within the transaction, in which no other process removes either of them.

    Returns
    -------
    tuple[list[int], Unlisted]
        Numbers of the segments, and the objects with their descriptions.
    """
    rows = dict(sql.execute("SELECT name, n FROM segments"))
    # Looked at again: what was written since the listing has its row already.
    lost = [
        n for name, n in rows.items() if name not in present and not object_exists(objects, name)
    ]
    present -= rows.keys() | {name for (name,) in sql.execute("SELECT name FROM leaving")}
    return lost, filter(None, map(partial(_read_description, objects), present))


def _compare_shared(
    objects: Objects, catalog: Catalog, news: News | None, announced: Mapping[str, Segment]
) -> tuple[list[int], Unlisted]:
    """Find rows without an object and objects without a row, outside of a transaction.

    A row that is older than the listing and whose object is not listed has left.

    Parameters
    ----------
    announced : Mapping[str, Segment]
        Descriptions that are known already.
    """
    # Rows first, then the listing: so a missing object had a row that was older.
    if news is None:
        rows, present = dict(catalog.read("SELECT name, n FROM segments")), set(objects.list())
        orphans, missing_names = dict(catalog.read(_ORPHANS)).keys(), rows.keys() - present
    else:
        put, removed = news[0].keys(), news[1]
        rows = _rows_by_name(catalog, "SELECT name, n FROM segments WHERE", put | removed)
        orphans = _rows_by_name(catalog, f"{_ORPHANS} AND", catalog.orphan_names).keys()
        present, missing_names = put | orphans, rows.keys() & removed

    lost = [rows[name] for name in missing_names]
    # Descriptions that came before the state of their prompts are read once more.
    new = present - rows.keys() | orphans & present
    new -= _rows_by_name(catalog, "SELECT name, 1 FROM leaving WHERE", new).keys()
    catalog.orphan_names = orphans | new
    descriptions: list[tuple[str, Segment | None]] = [
        (name, announced[name]) for name in announced.keys() & new
    ]

    if unread := new - announced.keys():
        with ThreadPoolExecutor(_REQUESTS) as threads:
            descriptions += filter(
                None,
                threads.map(
                    partial(_read_description, objects, first=_LARGE if news else HEAD), unread
                ),
            )

    # State before descriptions of it, and the oldest first: as they were last used, as far as it is
    # known.
    return lost, sorted(
        descriptions, key=lambda one: (one[1].kind != KV, one[1].created) if one[1] else (True, 0.0)
    )


def _decode_header(name: str, header: Header) -> Segment | None:
    """Return the description in an announced header; None if it is damaged or another object's."""
    with suppress(CorruptState):
        segment = read_description(lambda _: header)[0]
        return segment if segment.name == name else None
    return None


def _rows_by_name(catalog: Catalog, query: str, names: Iterable[str]) -> dict[str, int]:
    """Return the rows with these names. `query` ends where a condition may follow."""
    return dict(
        catalog.read(f"{query} name IN (SELECT value FROM json_each(?))", [json.dumps(list(names))])
    )


def _read_description(
    objects: Objects, name: str, first: int = HEAD
) -> tuple[str, Segment | None] | None:
    try:
        return name, read_description(partial(objects.head, name), first)[0]
    except CorruptState:
        return name, None
    except (ObjectMissing, StoreUnavailable):
        return None


def _read_again(sql: sqlite3.Connection, number: int) -> tuple[str, Segment] | None:
    """Rebuild the segment of a description from its entry; None for a damaged one."""
    query = (
        "SELECT s.name, s.partition, s.epoch, r.created, r.about FROM segments s JOIN links l ON "
        "l.segment = s.n"
        " JOIN records r ON r.n = l.record WHERE s.n = ?"
    )
    name, partition, epoch, created, about = sql.execute(query, (number,)).fetchone()
    try:
        meta = decode_meta(about)
    except CorruptState:
        return None

    return name, Segment(
        name,
        partition,
        epoch,
        DESCRIPTION,
        0,
        0,
        entry_id=meta.id,
        created=created,
        ttl=meta.ttl,
        about=about,
    )


def _index(
    sql: sqlite3.Connection, catalog: Catalog, name: str, segment: Segment, now: float
) -> Removal:
    """Index an object, with its entry if the object describes one.

    Returns
    -------
    Removal
        What leaves for it.

    Raises
    ------
    CorruptState
        If the object is damaged or another one.
    """
    if segment.name != name:
        raise CorruptState("it is another one")
    row = sql.execute("SELECT n FROM segments WHERE name = ?", (name,)).fetchone()
    # A removal is under way: a row would lose its object in a moment.
    if sql.execute("SELECT 1 FROM leaving WHERE name = ?", (name,)).fetchone():
        return Removal()

    meta = decode_meta(segment.about) if segment.about else None
    if meta is None:
        if row is None:
            changes.add_segment(sql, segment)
        return Removal()

    if _is_superseded(sql, meta, name):
        sql.execute("INSERT OR IGNORE INTO leaving VALUES (?)", (name,))
        return changes.evict(sql, row or ())
    object_slice = SegmentSlice(
        row[0] if row else changes.add_segment(sql, segment),
        name,
        segment.start,
        segment.stop,
        segment.stop,
    )
    slices = [object_slice]
    if segment.kind == DESCRIPTION:
        keys = PrefixKeys(meta.partition, meta.epoch, meta.token_ids, meta.spans)
        read: Read = lambda query, values: sql.execute(query, values).fetchall()  # noqa: E731
        chain = catalog.chain(len(keys), keys.prefix_key(len(keys)), now, read)
        # Its rows are not here yet: it is noted, and looked at again with the next news.
        if not chain:
            return Removal()
        slices = [*chain, object_slice]

    columns = (meta.id, meta.partition, meta.epoch, meta.kind)
    return changes.add_entry(sql, segment.about, columns, segment.created, segment.due, slices)


def _is_superseded(sql: sqlite3.Connection, meta: StateInfo, name: str) -> bool:
    """Return whether another object with the same description is preferred.

    All replicas choose alike.
    """
    query = (
        "SELECT r.created, max(s.name) FROM records r JOIN links l ON l.record = r.n JOIN segments "
        "s ON s.n = l.segment"
        # A put may have indexed the object itself meanwhile.
        f" WHERE r.id = ? AND s.kind != '{KV}' AND s.name != ?"
    )
    created, newest_name = sql.execute(query, (meta.id, name)).fetchone()
    return newest_name is not None and (created, newest_name) >= (meta.created, name)
