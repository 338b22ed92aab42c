"""Whether a catalog has the tables, indexes and triggers that its script makes, and nothing beside them.

A folder may come from anywhere. A view in a table's place may have rows without end, and a trigger of somebody else's changes
what a statement does (https://www.sqlite.org/security.html).
"""

import sqlite3
from contextlib import closing
from functools import cache
from typing import Any

from dejakv.store.connection import Damaged

_PARTS = "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
_COLUMNS = 'SELECT name, type, "notnull", dflt_value, pk, hidden FROM pragma_table_xinfo(?)'


def check_schema(connection: sqlite3.Connection, script: str) -> None:
    """Raises: Damaged if a database is not as `script` makes an empty one. Tables may have got their columns one by one."""
    found, made = _schema_of(connection), _made_by(script)
    if found != made:
        raise Damaged(f"the catalog has other tables or triggers than this version makes: {_names(found ^ made)}")


@cache
def _made_by(script: str) -> frozenset[tuple[Any, ...]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(script)
        return _schema_of(connection)


def _schema_of(connection: sqlite3.Connection) -> frozenset[tuple[Any, ...]]:
    parts: list[tuple[Any, ...]] = []
    for kind, name, table, sql in connection.execute(_PARTS).fetchall():
        if kind != "table":
            parts.append((name, kind, table, sql))
        elif not str(sql).startswith("CREATE TABLE "):
            parts.append((name, "virtual table", table, sql))
        else:
            parts.append((name, kind, table, frozenset(connection.execute(_COLUMNS, (name,)).fetchall())))
    return frozenset(parts)


def _names(parts: frozenset[tuple[Any, ...]]) -> str:
    return ", ".join(sorted({str(part[0])[:40] for part in parts})[:5])
