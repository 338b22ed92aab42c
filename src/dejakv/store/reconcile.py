"""Brings the rows of a catalog and its objects together when a store is opened."""

import sqlite3
from contextlib import suppress
from functools import partial

from dejakv.store import changes
from dejakv.store.base import CorruptChunk
from dejakv.store.budgets import POLICIES, Budget
from dejakv.store.catalog import Catalog, Piece
from dejakv.store.changes import Gone
from dejakv.store.objects import Missing, Objects, Unknown
from dejakv.store.records import decode_meta
from dejakv.store.segment import Segment, described


def reconcile(
    objects: Objects, catalog: Catalog, budget: Budget, now: float
) -> tuple[Gone, list[tuple[str, str]], int]:
    """Finishes what killed processes were removing, indexes objects without a row, drops rows without an object, removes what has
    expired, and meets the budget. Returns what has left, (partition, limit) of each record evicted, and the number of damaged objects.

    An object that cannot be read now stays. One that another process is about to index may be indexed or removed: it sees
    that in its own transaction, and tries again. Raises: sqlite3.Error; Unknown if objects cannot be listed.
    """
    damaged = 0
    present = set(objects.list())
    with catalog.transaction() as sql:
        leaving = "SELECT name FROM leaving"
        present.difference_update(name for (name,) in sql.execute(leaving))
        lost: list[int] = []
        for name, n in sql.execute("SELECT name, n FROM segments"):
            if name in present:
                present.remove(name)
            elif not is_there(objects, name):  # looked at again: what was written since the listing has its row already
                lost.append(n)
        gone = changes.evict(sql, lost)
        for name in present:
            try:
                with suppress(Missing, Unknown):
                    _index(sql, name, described(partial(objects.head, name))[0])
            except CorruptChunk:
                damaged += 1
                sql.execute("INSERT INTO leaving VALUES (?)", (name,))
        gone += changes.remove(sql, *changes.expired(sql, now))
        room = changes.make_room(sql, POLICIES[budget.policy], budget.max_bytes, budget.max_entries)
        gone += room
        gone.objects += [name for (name,) in sql.execute(leaving)]
    why = "bytes" if budget.max_bytes else "entries"
    return gone, [(partition, why) for _, partition in room.records], damaged


def is_there(objects: Objects, name: str) -> bool:
    """Whether there is an object, as far as it can be told."""
    try:
        objects.head(name, 8)
    except Missing:
        return False
    except (Unknown, CorruptChunk):
        return True
    return True


def _index(sql: sqlite3.Connection, name: str, segment: Segment) -> None:
    """Add the row of an unlisted object, and its record if the object holds it. Raises: CorruptChunk"""
    if segment.name != name:
        raise CorruptChunk("it is another one")
    meta = decode_meta(segment.about) if segment.about else None
    if meta is not None and sql.execute("SELECT 1 FROM records WHERE id = ?", (meta.id,)).fetchone():
        sql.execute("INSERT INTO leaving VALUES (?)", (name,))  # an older one, or one that was never finished
        return
    n = changes.add_segment(sql, segment)
    if meta is not None:
        piece = Piece(n, name, segment.start, segment.stop, segment.stop)
        columns = (meta.id, meta.partition, meta.epoch, meta.kind)
        changes.add_record(sql, segment.about, columns, segment.created, segment.due, [piece])
