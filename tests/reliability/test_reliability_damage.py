"""Stored bytes that went bad: nothing damaged is ever served, and each costs one counted miss."""

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import CATALOGS, DAMAGED, SEED

from dejakv.errors import StoreError
from dejakv.store import open_store
from dejakv.store.store import Store
from dejakv.testing import make_stored_state
from dejakv.testing.stored_states import same_bits

Damage = Callable[[bytearray, random.Random], bytearray]


def flip_bits(raw: bytearray, rnd: random.Random) -> bytearray:
    for _ in range(rnd.choice((1, 1, 1, 2, 5, 40))):
        raw[rnd.randrange(len(raw))] ^= 1 << rnd.randrange(8)
    return raw


def flip_a_bit_of_the_header(raw: bytearray, rnd: random.Random) -> bytearray:
    raw[rnd.randrange(min(len(raw), 300))] ^= 1 << rnd.randrange(8)
    return raw


def truncate(raw: bytearray, rnd: random.Random) -> bytearray:
    return raw[: rnd.choice((0, 1, len(raw) - 1, rnd.randrange(len(raw))))]


def extend(raw: bytearray, rnd: random.Random) -> bytearray:
    return raw + rnd.randbytes(rnd.choice((1, 8, 4096)))


def lose_a_block(raw: bytearray, rnd: random.Random) -> bytearray:
    """A page that was never written, or was written with something else."""
    start = rnd.randrange(len(raw))
    length = min(rnd.choice((16, 512, 4096)), len(raw) - start)
    raw[start : start + length] = rnd.choice((bytes(length), rnd.randbytes(length)))
    return raw


def noise(raw: bytearray, rnd: random.Random) -> bytearray:
    return bytearray(rnd.randbytes(rnd.choice((len(raw), 8, 100))))


WAYS: tuple[Damage, ...] = (flip_bits, flip_a_bit_of_the_header, truncate, extend, lose_a_block, noise)


def damaged(raw: bytes, rnd: random.Random) -> bytes:
    """Other bytes than `raw`."""
    while True:
        found = bytes(rnd.choice(WAYS)(bytearray(raw), rnd))
        if found != raw:
            return found


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
        stored_state = make_stored_state(number % 50, nbytes=rnd.choice(SIZES), seed=number)
        assert store.put(stored_state)
        (path,) = (folder / "segments").glob("*/*")
        path.write_bytes(damaged(path.read_bytes(), rnd))
        expect_one_counted_miss(store, stored_state.meta.id)
    assert store.stats().entries == 0
    store.close()


def damage_catalogs(folder: Path, rounds: int, seed: int) -> None:
    """Nothing wrong is served, and only `clear` may say that it could not be done; the next opening has all in order."""
    rnd = random.Random(seed)
    stored_states = [make_stored_state(number, nbytes=400) for number in range(40)]
    store = open_store(folder / "whole")
    for stored_state in stored_states:
        assert store.put(stored_state)
    store.close()
    for _ in range(rounds):
        shutil.rmtree(folder / "used", ignore_errors=True)
        shutil.copytree(folder / "whole", folder / "used")
        path = folder / "used" / "catalog.sqlite"
        path.write_bytes(damaged(path.read_bytes(), rnd))
        store = open_store(folder / "used")
        for stored_state in stored_states:
            found = store.get(stored_state.meta.id)
            assert found is None or (
                same_bits(found.tensor, stored_state.tensor) and found.meta.token_ids == stored_state.meta.token_ids
            )
        store.put(make_stored_state(99))
        for meta in store.metas():
            assert meta.partition == "p"
        store.stats("p")
        with contextlib.suppress(StoreError):
            store.clear("p")
        store.close()
        again = open_store(folder / "used")
        again.clear()
        assert list((folder / "used" / "segments").glob("*/*")) == []
        assert all(again.put(stored_state) for stored_state in stored_states[:3])
        assert all(again.get(stored_state.meta.id) is not None for stored_state in stored_states[:3])
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
