"""Folders of the format before parents: they are read, and become folders of this one."""

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dejakv.errors import StoreError
from dejakv.store import metacodec
from dejakv.store.deltas import DeltaStore
from dejakv.store.disk import DiskStore
from dejakv.testing.prompts import check_whole, turns

SCHEMA_1 = """
CREATE TABLE chunks (
    id TEXT PRIMARY KEY, partition TEXT NOT NULL, epoch TEXT NOT NULL, meta BLOB NOT NULL,
    file TEXT NOT NULL, file_bytes INTEGER NOT NULL, checksum TEXT NOT NULL, nbytes INTEGER NOT NULL,
    hits INTEGER NOT NULL, last_used INTEGER NOT NULL);
CREATE INDEX by_partition ON chunks (partition, nbytes);
CREATE INDEX by_lru ON chunks (last_used);
CREATE INDEX by_lfu ON chunks (hits, last_used);
CREATE TABLE totals (entries INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TABLE removed (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL);
CREATE TRIGGER added AFTER INSERT ON chunks BEGIN
    UPDATE totals SET entries = entries + 1, bytes = bytes + new.nbytes; END;
CREATE TRIGGER dropped AFTER DELETE ON chunks BEGIN
    UPDATE totals SET entries = entries - 1, bytes = bytes - old.nbytes;
    INSERT INTO removed (id) VALUES (old.id); END;
PRAGMA user_version = 1;
"""
COLUMNS = "id, partition, epoch, meta, file, file_bytes, checksum, nbytes, hits, last_used"


def set_format(folder: Path, number: int) -> None:
    marker = folder / "dejakv-store.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "format": number}) + "\n")


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the version before wrote it, with the first two turns of a conversation, whole."""
    folder = tmp_path / "store"
    with monkeypatch.context() as patch:
        patch.setattr(metacodec, "_LATER_FIELDS", {})
        with closing(DiskStore(folder)) as store:
            for chunk in turns(2):
                assert store.put(chunk)
    path = folder / "catalog.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(f"SELECT {COLUMNS} FROM chunks").fetchall()
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA_1)
        connection.executemany(f"INSERT INTO chunks ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        connection.commit()
    path.chmod(0o600)
    set_format(folder, 1)
    return folder


def test_an_older_folder_is_read_and_gets_parents(older: Path) -> None:
    chunks = turns(4)
    inode = os.stat(older / "dejakv-store.json").st_ino
    with closing(DeltaStore(DiskStore(older))) as store:
        assert (store.stats().entries, store.stats().corrupt) == (2, 0)
        check_whole(store, chunks[:2])
        for chunk in chunks[2:]:
            assert store.put(chunk)
        check_whole(store, chunks)
        meta = store.meta(chunks[2].meta.id)
        assert meta is not None
        assert meta.parent == chunks[1].meta.id
    assert json.loads((older / "dejakv-store.json").read_text())["format"] == 2
    assert os.stat(older / "dejakv-store.json").st_ino == inode, "processes hold locks on it"
    with closing(DeltaStore(DiskStore(older))) as again:
        check_whole(again, chunks)
        assert again.clear() == 4
        assert again.stats().bytes == 0


def test_an_older_folder_without_a_marker_is_read(older: Path) -> None:
    (older / "dejakv-store.json").unlink()
    with closing(DeltaStore(DiskStore(older))) as store:
        check_whole(store, turns(2))


def test_a_folder_that_an_older_version_uses_is_left_to_it(older: Path) -> None:
    with closing(DiskStore(older)):
        set_format(older, 1)
        with pytest.raises(StoreError, match="older DejaKV and other processes use it: end them"):
            DiskStore(older)
    DiskStore(older).close()
