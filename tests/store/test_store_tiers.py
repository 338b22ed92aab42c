"""Two stores as one, and the store that settings ask for."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.store.layers import layer

from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError, StoreError
from dejakv.store import open_store, store_of
from dejakv.store.admission import AdmittingStore
from dejakv.store.base import Store
from dejakv.store.deltas import DeltaStore
from dejakv.store.disk import DiskStore
from dejakv.store.memory import MemoryStore
from dejakv.store.tiered import TieredStore
from dejakv.testing.chunks import make_chunk, same_bits


def told_by(store: Store) -> list[str]:
    told: list[str] = []
    store.on_evict(told.append)
    return told


def test_what_memory_lost_comes_from_disk_and_is_in_memory_again(tmp_path: Path) -> None:
    memory, disk = MemoryStore(max_entries=1), DiskStore(tmp_path / "store")
    store = TieredStore(memory, disk)
    told = told_by(store)
    first, second = make_chunk(1), make_chunk(2)
    store.put(first)
    store.put(second)
    assert memory.meta(first.meta.id) is None
    assert told == []
    found = store.get(first.meta.id)
    assert found is not None
    assert same_bits(found.tensor, first.tensor)
    assert memory.meta(first.meta.id) is not None
    assert disk.stats().hits == 1
    store.get(first.meta.id)
    assert disk.stats().hits == 1
    assert (store.stats().hits, store.stats().entries) == (2, 2)
    assert store.stats().bytes == disk.stats().bytes
    store.close()


def test_what_leaves_the_disk_leaves_memory_and_is_told_once(tmp_path: Path) -> None:
    memory = MemoryStore()
    store = TieredStore(memory, DiskStore(tmp_path / "store", max_entries=1))
    told = told_by(store)
    store.put(make_chunk(1))
    store.put(make_chunk(2))
    assert told == [make_chunk(1).meta.id]
    assert [meta.id for meta in memory.metas()] == [make_chunk(2).meta.id]
    other = DiskStore(tmp_path / "store")
    other.delete(make_chunk(2).meta.id)
    assert store.back.meta(make_chunk(2).meta.id) is None
    assert told == [make_chunk(1).meta.id, make_chunk(2).meta.id]
    assert store.get(make_chunk(2).meta.id) is None
    other.close()
    store.close()


def test_memory_serves_what_the_disk_refuses(tmp_path: Path) -> None:
    store = TieredStore(MemoryStore(max_entries=2), DiskStore(tmp_path / "store", max_bytes=6_000))
    told = told_by(store)
    large = make_chunk(1, nbytes=20_000)
    assert store.put(large)
    assert store.put(make_chunk(2))
    assert store.stats().entries == 2
    assert store.stats().refused == {"too_large": 1}
    assert store.get(large.meta.id) is not None
    assert len(list(store.metas())) == 2
    assert told == []
    for number in (3, 4):
        assert store.put(make_chunk(number, nbytes=20_000))
    assert told.count(large.meta.id) == 1
    assert store.get(large.meta.id) is None
    store.close()


def below(store: Store) -> Store:
    """What a store without duplicates is put around."""
    store = layer(store, DeltaStore)
    return store.inner


def test_settings_choose_the_store(tmp_path: Path) -> None:
    assert isinstance(below(open_store()), MemoryStore)
    disk = open_store(tmp_path / "a")
    assert isinstance(below(disk), DiskStore)
    tiered = open_store(tmp_path / "b", memory_bytes=1000)
    tiers = below(tiered)
    assert isinstance(tiers, TieredStore)
    assert isinstance(tiers.front, MemoryStore)
    assert isinstance(tiers.back, DiskStore)
    for store in (disk, tiered):
        store.close()
    assert isinstance(open_store(second_sight=True), AdmittingStore)
    config = SemanticCacheConfig(cache_dir=str(tmp_path / "c"), max_cached_blocks=1, policy="lfu", min_tokens=17)
    store = store_of(config)
    assert isinstance(store, AdmittingStore)
    assert isinstance(below(store.inner), TieredStore)
    assert store.put(make_chunk(1))
    assert store.put(make_chunk(2))
    assert store.stats().entries == 1
    store.close()


def test_wrong_settings_say_what_is_right(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="negative"):
        open_store(max_bytes=-1)
    with pytest.raises(ConfigError, match="lru, lfu"):
        open_store(policy="random")  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="folder"):
        open_store(tmp_path / "file")


def test_a_front_filled_on_reading_holds_what_was_read(tmp_path: Path) -> None:
    memory = MemoryStore()
    store = TieredStore(memory, DiskStore(tmp_path / "store"), fill="read")
    told = told_by(store)
    first, second = make_chunk(1), make_chunk(2)
    assert store.put(first)
    assert store.put(second)
    assert memory.stats().entries == 0
    read = store.get(first.meta.id)
    assert read is not None
    assert same_bits(read.tensor, first.tensor)
    assert [meta.id for meta in memory.metas()] == [first.meta.id]
    assert store.put(first)  # a newer one: the front must not go on serving the old
    assert memory.stats().entries == 0
    assert store.stats().entries == 2
    assert told == []


def test_a_front_filled_on_reading_takes_what_the_back_refuses(tmp_path: Path) -> None:
    memory = MemoryStore()
    store = TieredStore(memory, DiskStore(tmp_path / "store", max_bytes=10), fill="read")
    chunk = make_chunk(1)
    assert store.put(chunk)
    assert [meta.id for meta in memory.metas()] == [chunk.meta.id]


def test_an_id_that_the_disk_cannot_name_costs_nobody_else_a_refusal(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", memory_bytes=1 << 20)
    odd = replace(make_chunk(1), meta=replace(make_chunk(1).meta, id="\ud800"))
    assert store.put(odd)  # in memory alone
    assert store.get("\ud800") is not None
    store.flush()
    assert store.put(make_chunk(2))
    assert store.stats().refused == {"invalid": 1}
    store.close()
