"""Damaged files and rows cost a counted miss and nothing else."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dejakv.store.open import open_store
from dejakv.store.store import Store
from dejakv.testing.stored_states import make_stored_state, same_bits

LARGE = 3 << 20


def state_file(folder: Path, number: int) -> Path:
    """The file of a stored state, found by its id, which the header names."""
    id = make_stored_state(number).meta.id.encode()
    return next(path for path in (folder / "segments").glob("*/*") if path.is_file() and id in path.read_bytes()[:1500])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path / "store")
    for number in range(3):
        assert store.put(make_stored_state(number))
    yield store
    store.close()


def expect_set_aside(store: Store, number: int) -> None:
    gone: list[str] = []
    store.listen(removed=gone.append)
    id = make_stored_state(number).meta.id
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
        found = store.get(make_stored_state(other).meta.id)
        assert found is not None
        assert same_bits(found.tensor, make_stored_state(other).tensor)
    assert store.put(make_stored_state(number))
    assert store.get(id) is not None


def cut_to(length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, length)


def flipped_at(where: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[int(where * len(raw))] ^= 4
        path.write_bytes(raw)

    return flip


DAMAGES: dict[str, Callable[[Path], object]] = {
    **{f"flipped at {where}": flipped_at(where) for where in (0.0, 0.01, 0.05, 0.3, 0.6, 0.9, 0.9999)},
    **{f"cut to {length}": cut_to(length) for length in (0, 5, 100, 3000)},
    "missing": Path.unlink,
    "of another state": lambda path: path.write_bytes(state_file(path.parents[2], 2).read_bytes()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_counted_miss(store: Store, tmp_path: Path, damage: str) -> None:
    DAMAGES[damage](state_file(tmp_path / "store", 1))
    expect_set_aside(store, 1)


def test_a_large_state_is_mapped_and_survives_its_eviction(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", max_entries=1)
    stored_state = make_stored_state(0, nbytes=LARGE)
    store.put(stored_state)
    found = store.get(stored_state.meta.id)
    assert found is not None
    assert store.put(make_stored_state(1))
    assert list((tmp_path / "store" / "segments").glob("*/*")) == [state_file(tmp_path / "store", 1)]
    assert same_bits(found.tensor, stored_state.tensor)
    store.close()
    assert same_bits(found.tensor, stored_state.tensor)


@pytest.mark.parametrize("kind", ["fifo", "folder", "sparse", "link", "dangling link"])
def test_what_is_no_file_of_ours_is_not_read_and_the_state_can_be_stored_again(
    store: Store, tmp_path: Path, kind: str
) -> None:
    """A pipe would be waited for, 200 GB of nothing mapped, a link followed."""
    path = state_file(tmp_path / "store", 1)
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


def test_a_log_handler_that_keeps_records_holds_no_damaged_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception in a record would hold the frames that read the stored state, and with them its map and an open file."""
    store = open_store(tmp_path / "store")
    assert store.put(make_stored_state(0, nbytes=LARGE))
    path = state_file(tmp_path / "store", 0)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    inode = path.stat().st_ino
    assert store.get(make_stored_state(0).meta.id) is None
    assert "checksum differs" in caplog.text
    gc.collect()
    mapped = {int(line.split()[4]) for line in Path("/proc/self/maps").read_text().splitlines()}
    assert inode not in mapped
    store.close()
