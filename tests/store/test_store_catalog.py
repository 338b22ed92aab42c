"""Damage to the catalog costs the rows it hit, or at worst makes the store start empty."""

import os
import resource
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejakv.store.disk import DiskStore
from dejakv.testing.chunks import make_chunk

LARGE = 3 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path / "store")
    for number in range(3):
        assert store.put(make_chunk(number))
    yield store
    store.close()


def test_a_damaged_row_is_a_miss(store: DiskStore) -> None:
    id = make_chunk(1).meta.id
    with sqlite3.connect(store.folder / "catalog.sqlite") as connection:
        (blob,) = connection.execute("SELECT meta FROM chunks WHERE id = ?", (id,)).fetchone()
        damaged = bytearray(blob)
        damaged[len(damaged) // 2] ^= 1
        connection.execute("UPDATE chunks SET meta = ? WHERE id = ?", (bytes(damaged), id))
    connection.close()
    again = DiskStore(store.folder)
    assert len(list(again.metas())) == 2
    assert again.stats().corrupt == 1
    assert again.get(id) is None
    again.close()


@pytest.mark.parametrize("damage", ["noise", "truncated", "version", "read-only"])
def test_a_damaged_catalog_is_set_aside_and_the_store_starts_empty(tmp_path: Path, damage: str) -> None:
    store = DiskStore(tmp_path / "store")
    store.put(make_chunk(0))
    store.close()
    path = tmp_path / "store" / "catalog.sqlite"
    if damage == "noise":
        path.write_bytes(np.random.default_rng(0).bytes(8192))
    elif damage == "truncated":
        os.truncate(path, 3000)
    elif damage == "read-only":
        raw = bytearray(path.read_bytes())
        raw[18] = 7  # the version that may write it
        path.write_bytes(raw)
    else:
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version = 99")
        connection.commit()
        connection.close()
    store = DiskStore(tmp_path / "store")
    assert store.stats().entries == 0
    assert store.stats().corrupt == 1
    assert list((tmp_path / "store" / "chunks").glob("*/*")) == []
    assert store.put(make_chunk(0))
    assert store.get(make_chunk(0).meta.id) is not None
    store.close()


def test_damage_inside_the_catalog_is_survived_and_remembered(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "store")
    chunks = [make_chunk(number, answer="x" * 2000) for number in range(60)]
    for chunk in chunks:
        store.put(chunk)
    store.close()
    store = DiskStore(tmp_path / "store")
    path, noise = tmp_path / "store" / "catalog.sqlite", np.random.default_rng(0)
    with path.open("r+b") as file:
        file.seek(8 * 4096)
        file.write(noise.bytes(path.stat().st_size - 8 * 4096))
    found = [store.get(chunk.meta.id) for chunk in chunks]
    assert any(chunk is None for chunk in found)
    assert len(list(store.metas())) < 60
    store.close()
    again = DiskStore(tmp_path / "store")
    assert again.stats().corrupt == 1
    assert all(again.put(chunk) for chunk in chunks)
    assert all(again.get(chunk.meta.id) is not None for chunk in chunks)
    again.close()
    assert DiskStore(tmp_path / "store").stats().entries == 60


@pytest.mark.parametrize(
    "change",
    [
        *(f"{column} = CAST(x'64ee39' AS TEXT)" for column in ("id", "partition", "epoch", "file", "checksum")),
        *(
            "file = '../../../elsewhere'",
            "file = 'ab/x.safetensors'",
            "file = 7",
            "file_bytes = 'x'",
            "file_bytes = -1",
        ),
        *("nbytes = 'many'", "nbytes = 2.5", "meta = 'text'", "checksum = x'00'", "file_bytes = 1 << 60"),
    ],
)
@pytest.mark.parametrize("when", ["closed", "open"])
def test_damage_in_any_column_costs_its_row(store: DiskStore, tmp_path: Path, change: str, when: str) -> None:
    (tmp_path / "elsewhere").write_text("mine")
    if when == "closed":
        store.close()
    with closing(sqlite3.connect(store.folder / "catalog.sqlite")) as connection:
        connection.execute(f"UPDATE chunks SET {change} WHERE id = ?", (make_chunk(1).meta.id,))
        connection.commit()
    used = DiskStore(store.folder) if when == "closed" else store
    assert used.get(make_chunk(1).meta.id) is None
    assert {meta.token_ids[0] for meta in used.metas()} == {0, 2}
    assert used.get(make_chunk(0).meta.id) is not None
    assert used.put(make_chunk(1))
    assert used.get(make_chunk(1).meta.id) is not None
    used.clear()
    used.close()
    again = DiskStore(store.folder)
    assert (again.stats().entries, again.stats().bytes) == (0, 0)
    assert list((store.folder / "chunks").glob("*/*")) == []
    again.close()
    assert (tmp_path / "elsewhere").read_text() == "mine"


def test_a_schema_whose_text_is_damaged_is_set_aside(tmp_path: Path) -> None:
    """SQLite quotes it in a message that Python cannot read."""
    store = DiskStore(tmp_path / "store")
    store.put(make_chunk(0))
    store.close()
    path = tmp_path / "store" / "catalog.sqlite"
    raw = path.read_bytes()
    assert raw.count(b"by_lru") > 1
    path.write_bytes(raw.replace(b"by_lru", b"by_\xee39", 1))
    again = DiskStore(tmp_path / "store")
    assert again.put(make_chunk(0))
    again.close()


def test_a_checkpoint_that_fails_costs_nothing_that_was_committed(tmp_path: Path) -> None:
    """Every 64th write shortens the log, which a full or failing disk may refuse."""
    store = DiskStore(tmp_path / "store")
    told: list[str] = []

    def trace(statement: str) -> None:
        if "wal_checkpoint" in statement:
            told.append(statement)
            # From here on the kernel refuses to let the catalog grow, as a full disk does.
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with store._catalog._writer.use() as connection:
        connection.set_trace_callback(trace)
    stored = []
    try:
        for number in range(70):
            stored.append(store.put(make_chunk(number, nbytes=64)))
            if told:
                break
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert told
    assert stored == [True] * len(stored)
    assert all(store.get(make_chunk(number, nbytes=64).meta.id) is not None for number in range(len(stored)))
    assert store.stats().corrupt == 0
    store.close()


@pytest.mark.parametrize("by_another", [False, True])
def test_an_entry_that_leaves_while_it_is_looked_up_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_another: bool
) -> None:
    """Else a purge would find it again, and rows of a blend would be kept of it."""
    store = DiskStore(tmp_path)
    other = DiskStore(tmp_path) if by_another else store
    chunk = make_chunk(1)
    assert store.put(chunk)
    row = store._catalog.row

    def removed_meanwhile(id: str) -> Any:
        found = row(id)
        monkeypatch.undo()
        assert other.delete(id)
        assert store.meta(id) is None
        return found

    monkeypatch.setattr(store._catalog, "row", removed_meanwhile)
    store.meta(chunk.meta.id)
    assert store.meta(chunk.meta.id) is None
    other.close()
    store.close()
