"""Rows of a catalog, and the statements that change them inside a transaction. Those that follow parents are in `catalog_tree`.

A damaged database can have anything in any column, despite the schema. A row is used only if every column is of its
type and the file's name is one that the store can have written; any other row is known only by its number.
"""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dejakv.store.names import is_chunk

JOURNAL_ROWS = 10_000
COLUMNS = "rowid, id, partition, epoch, meta, file, file_bytes, checksum, nbytes, parent, node"
_TYPES = (int, str, str, str, bytes, str, int, str, int, str, int)
_NEXT_USE = "(SELECT coalesce(max(last_used), 0) + 1 FROM chunks)"


@dataclass(frozen=True)
class Row:
    """A chunk in the catalog. `meta` is a blob of `metacodec`, `file` a path below the chunks' folder; `node` is 1 or 0."""

    id: str
    partition: str
    epoch: str
    meta: bytes
    file: str
    file_bytes: int
    checksum: str
    nbytes: int
    parent: str = ""
    node: int = 0
    number: int = 0


@dataclass(frozen=True)
class Unreadable:
    """A damaged row."""

    number: int


@dataclass(frozen=True)
class Removed:
    """A removed row, or a prompt that became a node. `file` is still to be removed; None if the row did not name a file of the
    store, or keeps it. `node`: it was no prompt."""

    id: str
    partition: str
    file: str | None
    node: bool = False


def row_of(values: Sequence[Any]) -> Row | Unreadable:
    """The row in the result of a SELECT of `COLUMNS`."""
    sound = all(type(value) is kind for value, kind in zip(values, _TYPES, strict=True))
    if not sound or not all(is_text(value) for value in values if isinstance(value, str)) or not is_chunk(values[5]):
        return Unreadable(values[0])
    return Row(*values[1:], number=values[0])


def is_text(value: str) -> bool:
    """Whether it was read from valid UTF-8."""
    # Bytes that are not UTF-8 were decoded to surrogates.
    return value.isascii() or not any("\udc80" <= character <= "\udcff" for character in value)


def insert(connection: sqlite3.Connection, row: Row) -> None:
    """Adds a row as the most recently used one; the catalog assigns its number."""
    connection.execute(
        "INSERT INTO chunks (id, partition, epoch, meta, file, file_bytes, checksum, nbytes, parent, node, hits, last_used)"
        f" VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, {_NEXT_USE})",
        (
            *(row.id, row.partition, row.epoch, row.meta, row.file, row.file_bytes, row.checksum, row.nbytes),
            *(row.parent, row.node),
        ),
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


def delete(connection: sqlite3.Connection, numbers: Iterable[int]) -> list[Removed]:
    """Removes rows. The caller then unlinks their files."""
    gone: list[Removed] = []
    for number in numbers:
        query = "SELECT id, partition, file, node FROM chunks WHERE rowid = ?"
        found = connection.execute(query, (number,)).fetchone()
        if found is not None:
            # A trigger subtracts the bytes of a removed row, so damaged values are first replaced by a number.
            connection.execute(
                "UPDATE chunks SET nbytes = 0 WHERE rowid = ? AND typeof(nbytes) != 'integer'", (number,)
            )
            connection.execute("DELETE FROM chunks WHERE rowid = ?", (number,))
            id, partition, name, node = found
            file = name if isinstance(name, str) and is_chunk(name) else None
            gone.append(Removed(str(id), str(partition), file, node == 1))
    connection.execute("DELETE FROM removed WHERE seq <= (SELECT max(seq) FROM removed) - ?", (JOURNAL_ROWS,))
    return gone


def still_damaged(connection: sqlite3.Connection, rows: Mapping[int, str | None]) -> list[int]:
    """Of rows by number: those that still name the given file, and for None those that still cannot be read."""
    numbers: list[int] = []
    for number, file in rows.items():
        values = connection.execute(f"SELECT {COLUMNS} FROM chunks WHERE rowid = ?", (number,)).fetchone()
        if values is not None and (isinstance(row_of(values), Unreadable) if file is None else values[5] == file):
            numbers.append(number)
    return numbers


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
    recount(connection)
    return gone


def recount(connection: sqlite3.Connection) -> None:
    """Computes the totals anew."""
    connection.execute("DELETE FROM totals")
    connection.execute(
        "INSERT INTO totals SELECT coalesce(sum(node = 0), 0), cast(coalesce(sum(nbytes), 0) AS INTEGER) FROM chunks"
    )
