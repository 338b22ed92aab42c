"""Stored bytes that went bad: nothing damaged is ever served, and each costs one counted miss."""

import contextlib
import random
import shutil
from pathlib import Path

import pytest
from tests.reliability.damage import damaged
from tests.reliability.soak import CATALOGS, DAMAGED, SEED

from dejakv.errors import StoreError
from dejakv.store import open_store
from dejakv.store.store import Store
from dejakv.testing import make_chunk
from dejakv.testing.chunks import same_bits

SIZES = (16, 300, 5_000, 70_000)


def expect_one_counted_miss(store: Store, id: str) -> None:
    before = store.stats()
    assert store.get(id) is None
    after = store.stats()
    assert (after.corrupt, after.misses) == (before.corrupt + 1, before.misses + 1)
    assert store.meta(id) is None


def damage_files(folder: Path, rounds: int, seed: int) -> None:
    rnd = random.Random(seed)
    store = open_store(folder)
    for number in range(rounds):
        chunk = make_chunk(number % 50, nbytes=rnd.choice(SIZES), seed=number)
        assert store.put(chunk)
        (path,) = (folder / "segments").glob("*/*")
        path.write_bytes(damaged(path.read_bytes(), rnd))
        expect_one_counted_miss(store, chunk.meta.id)
    assert store.stats().entries == 0
    store.close()


def damage_catalogs(folder: Path, rounds: int, seed: int) -> None:
    """Nothing wrong is served, and only `clear` may say that it could not be done; the next opening has all in order."""
    rnd = random.Random(seed)
    chunks = [make_chunk(number, nbytes=400) for number in range(40)]
    store = open_store(folder / "whole")
    for chunk in chunks:
        assert store.put(chunk)
    store.close()
    for _ in range(rounds):
        shutil.rmtree(folder / "used", ignore_errors=True)
        shutil.copytree(folder / "whole", folder / "used")
        path = folder / "used" / "catalog.sqlite"
        path.write_bytes(damaged(path.read_bytes(), rnd))
        store = open_store(folder / "used")
        for chunk in chunks:
            found = store.get(chunk.meta.id)
            assert found is None or (
                same_bits(found.tensor, chunk.tensor) and found.meta.token_ids == chunk.meta.token_ids
            )
        store.put(make_chunk(99))
        for meta in store.metas():
            assert meta.partition == "p"
        store.stats("p")
        with contextlib.suppress(StoreError):
            store.clear("p")
        store.close()
        again = open_store(folder / "used")
        again.clear()
        assert list((folder / "used" / "segments").glob("*/*")) == []
        assert all(again.put(chunk) for chunk in chunks[:3])
        assert all(again.get(chunk.meta.id) is not None for chunk in chunks[:3])
        again.close()


def test_damaged_files_are_never_served(tmp_path: Path) -> None:
    damage_files(tmp_path / "store", 400, seed=0)


def test_a_damaged_catalog_serves_nothing_wrong(tmp_path: Path) -> None:
    damage_catalogs(tmp_path, 60, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_damaged_files_for_long(tmp_path: Path) -> None:
    damage_files(tmp_path / "store", DAMAGED, SEED)


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_damaged_catalogs_for_long(tmp_path: Path) -> None:
    damage_catalogs(tmp_path, CATALOGS, SEED)
