"""Damaged files and rows cost a counted miss and nothing else."""

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dejakv.store.disk import DiskStore
from dejakv.testing.chunks import make_chunk, same_bits

LARGE = 3 << 20


def chunk_file(store: DiskStore, number: int) -> Path:
    """The file of a chunk, found by its id, which the header names."""
    id = make_chunk(number).meta.id.encode()
    return next(path for path in (store.folder / "chunks").glob("*/*") if id in path.read_bytes()[:1024])


def quarantined(store: DiskStore) -> list[Path]:
    folder = store.folder / "quarantine"
    return sorted(folder.iterdir()) if folder.is_dir() else []


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path / "store")
    for number in range(3):
        assert store.put(make_chunk(number))
    yield store
    store.close()


def expect_set_aside(store: DiskStore, number: int) -> None:
    gone: list[str] = []
    store.on_evict(gone.append)
    id = make_chunk(number).meta.id
    before = store.stats()
    assert store.get(id) is None
    after = store.stats()
    assert (after.corrupt, after.misses) == (before.corrupt + 1, before.misses + 1)
    assert after.entries == before.entries - 1
    assert gone == [id]
    assert store.meta(id) is None
    assert store.get(id) is None
    assert store.stats().corrupt == after.corrupt
    for other in {0, 1, 2} - {number}:
        found = store.get(make_chunk(other).meta.id)
        assert found is not None
        assert same_bits(found.tensor, make_chunk(other).tensor)
    assert store.put(make_chunk(number))
    assert store.get(id) is not None


@pytest.mark.parametrize("where", [0.0, 0.01, 0.05, 0.3, 0.6, 0.9, 0.9999])
def test_a_flipped_bit(store: DiskStore, where: float) -> None:
    path = chunk_file(store, 1)
    raw = bytearray(path.read_bytes())
    raw[int(where * len(raw))] ^= 4
    path.write_bytes(raw)
    expect_set_aside(store, 1)
    assert len(quarantined(store)) == 1


@pytest.mark.parametrize("length", [0, 5, 100, 3000])
def test_a_truncated_file(store: DiskStore, length: int) -> None:
    os.truncate(chunk_file(store, 1), length)
    expect_set_aside(store, 1)
    assert len(quarantined(store)) == 1


def test_a_missing_file(store: DiskStore) -> None:
    chunk_file(store, 1).unlink()
    expect_set_aside(store, 1)
    assert quarantined(store) == []


def test_a_file_of_another_chunk(store: DiskStore) -> None:
    chunk_file(store, 1).write_bytes(chunk_file(store, 2).read_bytes())
    expect_set_aside(store, 1)


def test_a_link_is_not_followed(store: DiskStore, tmp_path: Path) -> None:
    path = chunk_file(store, 1)
    (tmp_path / "elsewhere").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert store.get(make_chunk(1).meta.id) is None
    assert store.get(make_chunk(2).meta.id) is not None


def test_a_large_chunk_is_mapped_and_survives_its_eviction(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "store", max_entries=1)
    chunk = make_chunk(0, nbytes=LARGE)
    store.put(chunk)
    found = store.get(chunk.meta.id)
    assert found is not None
    assert store.put(make_chunk(1))
    assert list((tmp_path / "store" / "chunks").glob("*/*")) == [chunk_file(store, 1)]
    assert same_bits(found.tensor, chunk.tensor)
    store.close()
    assert same_bits(found.tensor, chunk.tensor)


def test_a_flipped_bit_in_a_mapped_file(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "store")
    chunk = make_chunk(0, nbytes=LARGE)
    store.put(chunk)
    assert store.get(chunk.meta.id) is not None
    path = chunk_file(store, 0)
    with path.open("r+b") as file:
        file.seek(LARGE // 2)
        byte = file.read(1)[0]
        file.seek(LARGE // 2)
        file.write(bytes([byte ^ 1]))
    # Verified once is not verified for ever: the second load finds it.
    assert store.get(chunk.meta.id) is None
    assert store.stats().corrupt == 1
    store.close()


def test_the_quarantine_is_bounded_and_cleared_with_its_partition(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "store")
    for number in range(20):
        chunk = make_chunk(number, partition="a" if number % 2 else "b")
        store.put(chunk)
        path = next((store.folder / "chunks").glob("*/*"))
        os.truncate(path, 100)
        assert store.get(chunk.meta.id) is None
    assert len(quarantined(store)) == 16
    store.clear("a")
    assert len(quarantined(store)) == 8
    store.clear()
    assert quarantined(store) == []
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


@pytest.mark.parametrize("damage", ["noise", "truncated", "version"])
def test_a_damaged_catalog_is_set_aside_and_the_store_starts_empty(tmp_path: Path, damage: str) -> None:
    store = DiskStore(tmp_path / "store")
    store.put(make_chunk(0))
    store.close()
    path = tmp_path / "store" / "catalog.sqlite"
    if damage == "noise":
        path.write_bytes(np.random.default_rng(0).bytes(8192))
    elif damage == "truncated":
        os.truncate(path, 3000)
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
