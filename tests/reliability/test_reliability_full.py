"""Disks that fill up: what `put` said is what is there, and clearing works."""

import contextlib
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import DISKS, SEED

from dejakv.store import Store, open_store, purge_folder
from dejakv.testing import make_stored_state

SIZES = (800, 16_000, 48_000)


@contextlib.contextmanager
def somebody_fills(disk: Path, at_once: int = 4096) -> Iterator[None]:
    """Takes what room is left, in steps of so many bytes, and gives it back."""
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(at_once))
    try:
        yield
    finally:
        (disk / "filler").unlink()


@contextlib.contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """As the kernel limits them for this process: the same refusal without root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def put_some(store: Store, said: dict[str, bool], rnd: random.Random, count: int) -> None:
    for _ in range(count):
        stored_state = make_stored_state(len(said), nbytes=rnd.choice(SIZES))
        said[stored_state.meta.id] = store.put(stored_state)
        if rnd.random() < 0.2:
            store.get(rnd.choice(list(said)))


def expect_as_said(store: Store, folder: Path, said: dict[str, bool]) -> None:
    assert {id: store.get(id) is not None for id in said} == said
    assert store.stats().corrupt == 0
    assert list((folder / "temporary").iterdir()) == []
    assert len(list((folder / "segments").glob("*/*"))) == sum(said.values()) == store.stats().entries


def fill_disk(disk: Path, seed: int) -> None:
    rnd = random.Random(seed)
    folder = disk / f"store-{seed}"
    store = open_store(folder)
    said: dict[str, bool] = {}
    put_some(store, said, rnd, 150)
    for _ in range(2):
        with somebody_fills(disk):
            put_some(store, said, rnd, 20)
        put_some(store, said, rnd, 10)
    assert True in said.values()
    assert False in said.values()
    expect_as_said(store, folder, said)
    store.close()
    store = open_store(folder)
    expect_as_said(store, folder, said)
    with somebody_fills(disk):
        assert store.clear() == sum(said.values())
    assert list((folder / "segments").glob("*/*")) == []
    assert store.put(make_stored_state(0))
    assert store.clear() == 1
    store.close()
    purge_folder(folder)


@pytest.mark.parametrize("seed", range(3))
def test_a_disk_that_fills_up_keeps_what_it_took(small_disk: Path, seed: int) -> None:
    fill_disk(small_disk, seed)


@pytest.mark.parametrize("size", [30_000, 60_000, 200_000])
def test_a_limit_of_file_sizes_keeps_what_it_took(tmp_path: Path, size: int) -> None:
    store = open_store(tmp_path / "store")
    said: dict[str, bool] = {}
    rnd = random.Random(size)
    put_some(store, said, rnd, 5)
    with files_no_larger_than(size):
        put_some(store, said, rnd, 100)
        expect_as_said(store, tmp_path / "store", said)
    assert False in said.values()
    put_some(store, said, rnd, 5)
    expect_as_said(store, tmp_path / "store", said)
    store.close()


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_disks_that_fill_up_for_long(small_disk: Path) -> None:
    for seed in range(SEED, SEED + DISKS):
        fill_disk(small_disk, seed)
