"""A catalog with tables, views or triggers that are not ours is set aside, and the store starts empty."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from dejakv.store.catalog import _PARENTS, _SCHEMA
from dejakv.store.connection import Damaged
from dejakv.store.disk import DiskStore
from dejakv.store.schema import check_schema
from dejakv.testing.chunks import make_chunk


def a_view(connection: sqlite3.Connection) -> None:
    connection.execute("DROP TABLE removed")
    connection.execute("CREATE VIEW removed AS SELECT 1 AS seq, 'x' AS id")


def a_trigger(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TRIGGER mine AFTER UPDATE ON chunks BEGIN DELETE FROM totals; END")


def another_trigger(connection: sqlite3.Connection) -> None:
    connection.execute("DROP TRIGGER dropped")
    connection.execute("CREATE TRIGGER dropped AFTER DELETE ON chunks BEGIN DELETE FROM removed; END")


def a_column(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE chunks ADD COLUMN twice TEXT GENERATED ALWAYS AS (id || id)")


def an_index(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE UNIQUE INDEX one ON chunks (partition)")


def a_virtual_table(connection: sqlite3.Connection) -> None:
    connection.execute("DROP TABLE removed")
    connection.execute("CREATE VIRTUAL TABLE removed USING fts5(seq, id)")


CHANGES = (a_view, a_trigger, another_trigger, a_column, an_index, a_virtual_table)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_ours_is_set_aside(tmp_path: Path, change: Callable[[sqlite3.Connection], None]) -> None:
    with closing(DiskStore(tmp_path / "store")) as store:
        assert store.put(make_chunk(1))
    with closing(sqlite3.connect(tmp_path / "store" / "catalog.sqlite")) as connection:
        change(connection)
        connection.commit()
    with closing(DiskStore(tmp_path / "store")) as store:
        assert store.get(make_chunk(1).meta.id) is None
        assert store.stats().corrupt == 1
        assert store.put(make_chunk(2))
        assert store.get(make_chunk(2).meta.id) is not None
    assert any("catalog" in path.name for path in (tmp_path / "store" / "quarantine").iterdir())


def test_a_catalog_as_the_script_makes_it_is_ours() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(_SCHEMA + _PARENTS)
        check_schema(connection, _SCHEMA + _PARENTS)
        connection.execute("DROP INDEX by_lru")
        with pytest.raises(Damaged, match="by_lru"):
            check_schema(connection, _SCHEMA + _PARENTS)
