"""Rows of a catalog that need others: children leave before their parents, and nodes with their last child.

As `order` does for stores in memory. Everything happens inside a transaction, which the caller undoes by raising.
"""

import sqlite3
from collections.abc import Collection, Iterable

from dejakv.errors import StoreError
from dejakv.store.base import as_node
from dejakv.store.catalog_rows import Removed, Row, delete, insert, is_text, recount
from dejakv.store.codec import CorruptChunk
from dejakv.store.connection import Damaged
from dejakv.store.counters import logger
from dejakv.store.eviction import Budget, Policy
from dejakv.store.metacodec import decode_meta, encode_meta

_CHILDLESS = "NOT EXISTS (SELECT 1 FROM chunks AS child WHERE child.parent = chunks.id AND child.parent != '')"


class NoRoom(StoreError):
    """What is not protected does not suffice."""


def leave(connection: sqlite3.Connection, number: int) -> list[Removed]:
    """A prompt leaves. With children it becomes a node; without, nodes above it may go too."""
    row = connection.execute(f"SELECT id, node, {_CHILDLESS} FROM chunks WHERE rowid = ?", (number,)).fetchone()
    if row is None:
        return []
    id, node, childless = row
    if childless:
        return remove(connection, [number])
    return [] if node == 1 else _become_node(connection, number, id)


def remove(connection: sqlite3.Connection, numbers: Iterable[int], keep: Collection[str] = ()) -> list[Removed]:
    """Removes rows, and nodes above them that have lost their last child, unless they are to be kept."""
    gone: list[Removed] = []
    for number in numbers:
        parent = _parent_of(connection, number)
        gone += delete(connection, [number])
        gone += without_childless(connection, parent, keep)
    return gone


def without_childless(connection: sqlite3.Connection, id: str, keep: Collection[str] = ()) -> list[Removed]:
    """Removes a node if it has no children, and then those above it."""
    gone: list[Removed] = []
    while id and id not in keep:
        query = f"SELECT rowid FROM chunks WHERE id = ? AND node = 1 AND {_CHILDLESS}"
        found = connection.execute(query, (id,)).fetchone()
        if found is None:
            break
        id = _parent_of(connection, found[0])
        gone += delete(connection, found)
    return gone


def remove_below(connection: sqlite3.Connection, ids: Iterable[str]) -> list[Removed]:
    """Removes all rows that need those of removed ids, children first."""
    gone: list[Removed] = []
    for id in filter(is_text, ids):  # no row can name a damaged id
        below = connection.execute(
            "WITH RECURSIVE lost (number, id) AS (SELECT rowid, id FROM chunks WHERE parent = ? AND parent != '' UNION"
            " SELECT chunks.rowid, chunks.id FROM chunks JOIN lost ON chunks.parent = lost.id AND chunks.parent != '')"
            " SELECT number FROM lost",
            (id,),
        ).fetchall()
        gone += delete(connection, [one for (one,) in reversed(below)])
    return gone


def prune(connection: sqlite3.Connection) -> list[Removed]:
    """Removes rows whose parents are missing, and nodes without children."""
    orphans = connection.execute(
        "WITH RECURSIVE sound (id) AS (SELECT id FROM chunks WHERE parent = '' UNION"
        " SELECT chunks.id FROM chunks JOIN sound ON chunks.parent = sound.id AND chunks.parent != '')"
        " SELECT rowid FROM chunks WHERE id NOT IN (SELECT id FROM sound)"
    ).fetchall()
    gone = delete(connection, [number for (number,) in orphans])
    for (id,) in connection.execute(f"SELECT id FROM chunks WHERE node = 1 AND {_CHILDLESS}").fetchall():
        gone += without_childless(connection, id)
    return gone


def has_parent(connection: sqlite3.Connection, row: Row) -> bool:
    """Whether the row's parent is there, if it names one."""
    query = "SELECT 1 FROM chunks WHERE id = ? AND partition = ? AND epoch = ?"
    return not row.parent or connection.execute(query, (row.parent, row.partition, row.epoch)).fetchone() is not None


def replace_row(connection: sqlite3.Connection, row: Row) -> list[Removed]:
    """Adds a row, in the place of one with its id, whose children it takes over."""
    found = connection.execute("SELECT rowid, parent FROM chunks WHERE id = ?", (row.id,)).fetchone()
    gone = delete(connection, found[:1]) if found else []
    insert(connection, row)
    return gone + (without_childless(connection, found[1]) if found and found[1] != row.parent else [])


def a_child(connection: sqlite3.Connection, row: Row) -> list[str]:
    """One child of a node, without which it would be none."""
    found = connection.execute("SELECT id FROM chunks WHERE parent = ? AND parent != '' LIMIT 1", (row.id,)).fetchall()
    return [id for (id,) in found] if row.node else []


def split_row(connection: sqlite3.Connection, node: Row, rest: Row) -> list[Removed] | None:
    """Puts `node` between a row and its parent, and `rest` in the row's place, with the row's uses. None if it is another one
    by now."""
    there = connection.execute("SELECT 1 FROM chunks WHERE id = ?", (node.id,)).fetchone()
    query = "SELECT rowid, partition, file, nbytes FROM chunks WHERE id = ? AND parent = ? AND node = ?"
    found = connection.execute(query, (rest.id, node.parent, rest.node)).fetchone()
    if there is not None or found is None:
        return None
    number, partition, file, held = found
    insert(connection, node)
    connection.execute(
        "UPDATE chunks SET meta = ?, file = ?, file_bytes = ?, checksum = ?, nbytes = ?, parent = ? WHERE rowid = ?",
        (rest.meta, rest.file, rest.file_bytes, rest.checksum, rest.nbytes, rest.parent, number),
    )
    connection.execute("UPDATE totals SET bytes = bytes + ?", (rest.nbytes - held,))
    connection.execute("INSERT INTO removed (id) VALUES (?)", (rest.id,))
    return [Removed(rest.id, partition, file)]


def make_room(
    connection: sqlite3.Connection,
    policy: Policy,
    budget: Budget,
    protected: Collection[str] = (),
    *,
    nbytes: int = 0,
    entries: int = 0,
    keep: Collection[str] = (),
) -> tuple[list[Removed], str]:
    """Evicts rows until so many more bytes and prompts fit the budget; which they were and the reason: `bytes` or `entries`.

    protected  ids of rows that stay as they are
    keep       ids of which the rows of state must stay; as prompts they may leave

    Rows that have children become nodes where nothing else can make room for an entry, as in `EvictionOrder.evict`.
    Raises: NoRoom if that does not suffice, sqlite3.DatabaseError if the totals are damaged.
    """
    gone: list[Removed] = []
    order = ", ".join(policy.fields)
    stay = {*protected, *keep}
    reason = "entries"
    while True:
        excess, surplus = _excess(connection, budget, nbytes, entries)
        if excess:
            reason = "bytes"
        if not excess and not surplus:
            return gone, reason
        number = _first(connection, f"SELECT rowid, id FROM chunks WHERE {_CHILDLESS} ORDER BY {order}", stay)
        if number is not None:
            gone += remove(connection, [number], stay)
            continue
        inner = f"SELECT rowid, id FROM chunks WHERE node = 0 AND NOT {_CHILDLESS} ORDER BY {order}"
        number = None if excess else _first(connection, inner, protected)
        if number is None:
            raise NoRoom("nothing else can be evicted")
        gone += leave(connection, number)


def _excess(connection: sqlite3.Connection, budget: Budget, nbytes: int, entries: int) -> tuple[int, int]:
    for _ in range(2):
        match connection.execute("SELECT entries, bytes FROM totals").fetchone():
            case (int(prompts), int(held)) if prompts >= 0 and held >= 0:
                return budget.excess_bytes(held + nbytes), budget.excess_entries(prompts + entries)
            case _:
                recount(connection)
    raise Damaged("the totals of the catalog are not numbers")


def _first(connection: sqlite3.Connection, query: str, but: Collection[str]) -> int | None:
    cursor = connection.execute(query)
    try:
        return next((number for number, id in cursor if id not in but), None)
    finally:
        cursor.close()  # the row is changed next


def _become_node(connection: sqlite3.Connection, number: int, id: str) -> list[Removed]:
    query = "SELECT partition, meta FROM chunks WHERE rowid = ?"
    partition, blob = connection.execute(query, (number,)).fetchone()
    try:
        left = encode_meta(as_node(decode_meta(blob)))
    except CorruptChunk as error:
        logger.warning("chunk %s and those that need its rows are removed: %s", id, error)
        gone = remove(connection, [number])
        return [*remove_below(connection, [id]), *gone]
    connection.execute(
        "UPDATE chunks SET meta = ?, nbytes = nbytes + ?, node = 1 WHERE rowid = ?",
        (left, len(left) - len(blob), number),
    )
    connection.execute("UPDATE totals SET entries = entries - 1, bytes = bytes + ?", (len(left) - len(blob),))
    connection.execute("INSERT INTO removed (id) VALUES (?)", (id,))
    return [Removed(id, partition, None)]


def _parent_of(connection: sqlite3.Connection, number: int) -> str:
    found = connection.execute("SELECT parent FROM chunks WHERE rowid = ?", (number,)).fetchone()
    parent = str(found[0]) if found else ""
    return parent if is_text(parent) else ""
