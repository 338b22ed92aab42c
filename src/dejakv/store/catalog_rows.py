"""Rows of a catalog, and the statements that change them inside a transaction.

A damaged database can have anything in any column, despite the schema. A row is used only if every column is of its
type and the file's name is one that the store can have written; any other row is known only by its number.
"""

import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dejakv.store.connection import Damaged
from dejakv.store.eviction import Budget, Policy
from dejakv.store.names import is_chunk

JOURNAL_ROWS = 10_000
COLUMNS = "rowid, id, partition, epoch, meta, file, file_bytes, checksum, nbytes"
_TYPES = (int, str, str, str, bytes, str, int, str, int)
_NEXT_USE = "(SELECT coalesce(max(last_used), 0) + 1 FROM chunks)"


@dataclass(frozen=True)
class Row:
    """A chunk in the catalog. `meta` is a blob of `metacodec`, `file` a path below the chunks' folder."""

    id: str
    partition: str
    epoch: str
    meta: bytes
    file: str
    file_bytes: int
    checksum: str
    nbytes: int
    number: int = 0


@dataclass(frozen=True)
class Unreadable:
    """A damaged row."""

    number: int


@dataclass(frozen=True)
class Removed:
    """A removed row, whose file is still to be removed. `file` is None if the row did not name a file of the store."""

    id: str
    partition: str
    file: str | None


def row_of(values: Sequence[Any]) -> Row | Unreadable:
    """The row in the result of a SELECT of `COLUMNS`."""
    sound = all(type(value) is kind for value, kind in zip(values, _TYPES, strict=True))
    if not sound or not all(_is_text(value) for value in values if isinstance(value, str)) or not is_chunk(values[5]):
        return Unreadable(values[0])
    return Row(*values[1:], number=values[0])


def _is_text(value: str) -> bool:
    # Bytes that are not UTF-8 were decoded to surrogates.
    return value.isascii() or not any("\udc80" <= character <= "\udcff" for character in value)


def insert(connection: sqlite3.Connection, row: Row) -> None:
    """Adds a row as the most recently used one; the catalog assigns its number."""
    connection.execute(
        "INSERT INTO chunks (id, partition, epoch, meta, file, file_bytes, checksum, nbytes, hits, last_used)"
        f" VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, {_NEXT_USE})",
        (row.id, row.partition, row.epoch, row.meta, row.file, row.file_bytes, row.checksum, row.nbytes),
    )


def note(connection: sqlite3.Connection, uses: Mapping[str, int]) -> None:
    """Adds uses to rows, by id; the last one is the most recent use."""
    for id, hits in uses.items():
        with suppress(UnicodeEncodeError):  # an id from a tier in front that this store did not take
            connection.execute(f"UPDATE chunks SET hits = hits + ?, last_used = {_NEXT_USE} WHERE id = ?", (hits, id))


def numbers_of(connection: sqlite3.Connection, ids: Iterable[str]) -> list[int]:
    """The numbers of the rows of these ids, for known ids."""
    found = (connection.execute("SELECT rowid FROM chunks WHERE id = ?", (id,)).fetchone() for id in ids)
    return [row[0] for row in found if row]


def numbers_in(connection: sqlite3.Connection, partition: str | None) -> list[int]:
    """The numbers of a partition's rows, or of all."""
    query = "SELECT rowid FROM chunks WHERE :partition IS NULL OR partition = :partition"
    return [number for (number,) in connection.execute(query, {"partition": partition}).fetchall()]


def delete(connection: sqlite3.Connection, numbers: Iterable[int], file: str | None = None) -> list[Removed]:
    """Removes rows (with `file`: only if it is still the row's). The caller then unlinks their files."""
    gone: list[Removed] = []
    for number in numbers:
        query = "SELECT id, partition, file FROM chunks WHERE rowid = ?"
        found = connection.execute(query, (number,)).fetchone()
        if found is not None and file in (None, found[2]):
            # A trigger subtracts the bytes of a removed row, so damaged values are first replaced by a number.
            connection.execute(
                "UPDATE chunks SET nbytes = 0 WHERE rowid = ? AND typeof(nbytes) != 'integer'", (number,)
            )
            connection.execute("DELETE FROM chunks WHERE rowid = ?", (number,))
            id, partition, name = found
            gone.append(Removed(str(id), str(partition), name if isinstance(name, str) and is_chunk(name) else None))
    connection.execute("DELETE FROM removed WHERE seq <= (SELECT max(seq) FROM removed) - ?", (JOURNAL_ROWS,))
    return gone


def delete_damaged(connection: sqlite3.Connection, rows: Mapping[int, str | None]) -> list[Removed]:
    """Removes rows by number: those that still name the given file, and for None those that still cannot be read."""
    gone: list[Removed] = []
    for number, file in rows.items():
        values = connection.execute(f"SELECT {COLUMNS} FROM chunks WHERE rowid = ?", (number,)).fetchone()
        if values is not None and (file is not None or isinstance(row_of(values), Unreadable)):
            gone += delete(connection, [number], file)
    return gone


def files_of(connection: sqlite3.Connection) -> dict[str, int]:
    """The chunk files named by rows, with the rows' numbers."""
    found = connection.execute("SELECT file, rowid FROM chunks").fetchall()
    return {file: number for file, number in found if isinstance(file, str) and is_chunk(file)}


def repair(connection: sqlite3.Connection) -> list[Removed]:
    """Removes every `Unreadable` row, and recomputes the totals."""
    # Without reading the descriptions, which are most of the catalog and have their own checksums.
    columns = COLUMNS.replace("meta", "CASE typeof(meta) WHEN 'blob' THEN x'' END")
    rows = (row_of(values) for values in connection.execute(f"SELECT {columns} FROM chunks").fetchall())
    bad = [row.number for row in rows if isinstance(row, Unreadable)]
    gone = delete(connection, bad)
    connection.execute(
        "UPDATE totals SET entries = (SELECT count(*) FROM chunks), bytes = (SELECT coalesce(sum(nbytes), 0) FROM chunks)"
    )
    return gone


def make_room(
    connection: sqlite3.Connection,
    policy: Policy,
    budget: Budget,
    protected: Collection[str] = (),
    *,
    id: str | None = None,
    nbytes: int = 0,
) -> tuple[list[int] | None, str]:
    """The numbers of the rows to evict before `id` with `nbytes` is added or replaced (no id: to meet the present budget),
    and the reason.

    The reason is `bytes` or `entries`; the numbers are None if the unprotected rows do not suffice.
    Raises: sqlite3.DatabaseError if the totals are damaged.
    """
    totals = connection.execute("SELECT entries, bytes FROM totals").fetchone() or ()
    old = connection.execute("SELECT nbytes FROM chunks WHERE id = ?", (id,)).fetchone()
    replaced = old[0] if old and type(old[0]) is int else 0
    match totals:
        case (int(entries), int(held)):
            pass
        case _:
            raise Damaged("the totals of the catalog are not numbers")
    excess = budget.excess_bytes(held + nbytes - replaced)
    surplus = budget.excess_entries(entries + (id is not None and old is None))
    reason = "bytes" if excess else "entries"
    chosen: list[int] = []
    freed = 0
    if excess or surplus:
        query = f"SELECT rowid, id, nbytes FROM chunks ORDER BY {', '.join(policy.fields)}"
        for number, other, size in connection.execute(query):
            if other == id or other in protected:
                continue
            chosen.append(number)
            freed += size if type(size) is int else 0
            if freed >= excess and len(chosen) >= surplus:
                break
    return (chosen if freed >= excess and len(chosen) >= surplus else None), reason
