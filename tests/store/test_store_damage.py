"""Damaged files and rows cost a counted miss and nothing else."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dejakv.store.open import open_store
from dejakv.store.store import Store
from dejakv.testing.chunks import make_chunk, same_bits

LARGE = 3 << 20


def chunk_file(folder: Path, number: int) -> Path:
    """The file of a chunk, found by its id, which the header names."""
    id = make_chunk(number).meta.id.encode()
    return next(path for path in (folder / "segments").glob("*/*") if path.is_file() and id in path.read_bytes()[:1500])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path / "store")
    for number in range(3):
        assert store.put(make_chunk(number))
    yield store
    store.close()


def expect_set_aside(store: Store, number: int) -> None:
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
def test_a_flipped_bit(store: Store, tmp_path: Path, where: float) -> None:
    path = chunk_file(tmp_path / "store", 1)
    raw = bytearray(path.read_bytes())
    raw[int(where * len(raw))] ^= 4
    path.write_bytes(raw)
    expect_set_aside(store, 1)


@pytest.mark.parametrize("length", [0, 5, 100, 3000])
def test_a_truncated_file(store: Store, tmp_path: Path, length: int) -> None:
    os.truncate(chunk_file(tmp_path / "store", 1), length)
    expect_set_aside(store, 1)


def test_a_missing_file(store: Store, tmp_path: Path) -> None:
    chunk_file(tmp_path / "store", 1).unlink()
    expect_set_aside(store, 1)


def test_a_file_of_another_chunk(store: Store, tmp_path: Path) -> None:
    chunk_file(tmp_path / "store", 1).write_bytes(chunk_file(tmp_path / "store", 2).read_bytes())
    expect_set_aside(store, 1)


def test_a_link_is_not_followed(store: Store, tmp_path: Path) -> None:
    path = chunk_file(tmp_path / "store", 1)
    (tmp_path / "elsewhere").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert store.get(make_chunk(1).meta.id) is None
    assert store.get(make_chunk(2).meta.id) is not None


def test_a_large_chunk_is_mapped_and_survives_its_eviction(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", max_entries=1)
    chunk = make_chunk(0, nbytes=LARGE)
    store.put(chunk)
    found = store.get(chunk.meta.id)
    assert found is not None
    assert store.put(make_chunk(1))
    assert list((tmp_path / "store" / "segments").glob("*/*")) == [chunk_file(tmp_path / "store", 1)]
    assert same_bits(found.tensor, chunk.tensor)
    store.close()
    assert same_bits(found.tensor, chunk.tensor)


def test_a_flipped_bit_in_a_mapped_file(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    chunk = make_chunk(0, nbytes=LARGE)
    store.put(chunk)
    assert store.get(chunk.meta.id) is not None
    path = chunk_file(tmp_path / "store", 0)
    with path.open("r+b") as file:
        file.seek(LARGE // 2)
        byte = file.read(1)[0]
        file.seek(LARGE // 2)
        file.write(bytes([byte ^ 1]))
    # Verified once is not verified for ever: the second load finds it.
    assert store.get(chunk.meta.id) is None
    assert store.stats().corrupt == 1
    store.close()


@pytest.mark.parametrize("kind", ["fifo", "folder", "sparse", "link", "dangling link"])
def test_what_is_no_file_of_ours_is_not_read_and_the_chunk_can_be_stored_again(
    store: Store, tmp_path: Path, kind: str
) -> None:
    """A pipe would be waited for, 200 GB of nothing mapped, a link followed."""
    path = chunk_file(tmp_path / "store", 1)
    (tmp_path / "elsewhere").write_bytes(path.read_bytes())
    if kind == "sparse":
        os.truncate(path, 200 << 30)
    else:
        path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "nowhere")
    expect_set_aside(store, 1)
    assert (tmp_path / "elsewhere").exists()


def test_a_log_handler_that_keeps_records_holds_no_damaged_chunk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception in a record would hold the frames that read the chunk, and with them its map and an open file."""
    store = open_store(tmp_path / "store")
    assert store.put(make_chunk(0, nbytes=LARGE))
    path = chunk_file(tmp_path / "store", 0)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    inode = path.stat().st_ino
    assert store.get(make_chunk(0).meta.id) is None
    assert "checksum differs" in caplog.text
    gc.collect()
    mapped = {int(line.split()[4]) for line in Path("/proc/self/maps").read_text().splitlines()}
    assert inode not in mapped
    store.close()
