"""`dejakv.open_store`: one name for a store of any kind."""

from pathlib import Path
from typing import Any

import pytest
from tests.store.layers import layer

import dejakv
from dejakv.errors import ConfigError
from dejakv.store.deltas import DeltaStore
from dejakv.store.disk import DiskStore
from dejakv.store.memory import MemoryStore
from dejakv.store.tiered import TieredStore
from dejakv.testing import make_chunk


@pytest.mark.parametrize("where", [None, "memory://"])
def test_a_store_in_memory(where: str | None) -> None:
    store = dejakv.open_store(where, max_entries=1, policy="lfu")
    store = layer(store, DeltaStore)
    assert isinstance(store.inner, MemoryStore)
    assert store.put(make_chunk(1))
    assert store.put(make_chunk(2))
    assert store.stats().entries == 1


@pytest.mark.parametrize("kind", [str, Path])
def test_a_store_in_a_folder(tmp_path: Path, kind: Any) -> None:
    store = dejakv.open_store(kind(tmp_path / "store"), max_bytes=1 << 20, memory_bytes=1 << 20)
    store = layer(store, DeltaStore)
    assert isinstance(store.inner, TieredStore)
    assert isinstance(store.inner.back, DiskStore)
    assert store.put(make_chunk(1))
    store.close()
    again = dejakv.open_store(kind(tmp_path / "store"))
    assert again.get(make_chunk(1).meta.id) is not None
    again.close()


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_a_store_in_redis(redis_server: Any, memory_bytes: int) -> None:
    store = dejakv.open_store(redis_server.url, memory_bytes=memory_bytes)
    store = layer(store, DeltaStore)
    assert isinstance(store.inner, TieredStore) is bool(memory_bytes)
    assert store.put(make_chunk(31))
    other = dejakv.open_store(redis_server.url)
    assert other.get(make_chunk(31).meta.id) is not None
    assert other.clear() == 1
    other.close()
    store.close()


@pytest.mark.parametrize("url", ["http://nowhere", "s3://bucket/cache", "://", "memory://x"])
def test_a_url_of_no_known_kind_says_what_is_known(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"give a folder.*redis://"):
        dejakv.open_store(url)
    assert list(tmp_path.iterdir()) == []
