"""The tier in Redis when the server is down, slow, full or holds damaged values."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.store.layers import layer

from dejakv.errors import StoreError
from dejakv.store import open_store
from dejakv.store.breaker import Breaker
from dejakv.store.deltas import DeltaStore
from dejakv.store.purging import purge
from dejakv.store.redis import RedisStore
from dejakv.store.selection import Selection
from dejakv.store.tiered import TieredStore
from dejakv.testing.chunks import make_chunk, same_bits
from dejakv.testing.prompts import turns


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def keys(server: Any, pattern: str) -> list[bytes]:
    with redis.Redis.from_url(server.url) as client:
        return list(client.keys(pattern))


@pytest.fixture
def store(redis_server: Any, tmp_path: Path) -> Iterator[RedisStore]:
    store = RedisStore(redis_server.url, namespace=str(tmp_path), timeout=5.0)
    yield store
    store.clear()
    store.close()


@pytest.mark.parametrize("kind", ["m", "c"])
def test_a_flipped_bit_is_a_counted_miss(redis_server: Any, store: RedisStore, kind: str) -> None:
    chunk = make_chunk(1)
    store.put(chunk)
    key = store._key(kind, chunk.meta.id)
    with redis.Redis.from_url(redis_server.url) as client:
        client.setrange(key, 150, b"\x01\x02\x03")
    assert store.get(chunk.meta.id) is None
    assert (store.stats().corrupt, store.stats().entries, store.stats().misses) == (1, 0, 1)
    assert store.put(chunk)
    assert store.get(chunk.meta.id) is not None


def test_half_an_entry_is_a_miss_and_is_cleaned_up(redis_server: Any, store: RedisStore) -> None:
    chunk = make_chunk(1)
    store.put(chunk)
    key = store._key("c", chunk.meta.id)
    with redis.Redis.from_url(redis_server.url) as client:
        client.delete(key)
    assert store.get(chunk.meta.id) is None
    assert store.stats().entries == 0


def test_clearing_leaves_no_content_behind(redis_server: Any, store: RedisStore) -> None:
    for number in range(5):
        store.put(make_chunk(number))
    assert len(keys(redis_server, f"{store._prefix}[mc]:*".replace("{", "?").replace("}", "?"))) == 10
    for chunk in turns(3):
        DeltaStore(store).put(chunk)
    assert store.clear() == 8
    assert keys(redis_server, f"{store._prefix}[mcnpqk]:*".replace("{", "?").replace("}", "?")) == []
    assert store.stats().bytes == 0


def test_namespaces_are_apart(redis_server: Any, store: RedisStore) -> None:
    other = RedisStore(redis_server.url, namespace="another")
    store.put(make_chunk(1))
    assert other.get(make_chunk(1).meta.id) is None
    assert list(other.metas()) == []
    other.close()


def test_a_chunk_above_the_limit_of_a_value_is_refused(redis_server: Any) -> None:
    store = RedisStore(redis_server.url, namespace="limit", max_chunk=10_000)
    assert store.put(make_chunk(1, nbytes=20_000)) is False
    assert store.stats("p").refused == {"too_large": 1}
    store.close()


def test_a_server_out_of_memory_is_full(redis_server: Any) -> None:
    store = RedisStore(redis_server.url, namespace="oom", timeout=5.0)
    with redis.Redis.from_url(redis_server.url) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "100kb")
        try:
            assert store.put(make_chunk(1)) is False
        finally:
            client.config_set("maxmemory", "0")
    assert store.stats("p").refused == {"full": 1}
    assert store.put(make_chunk(1))
    store.clear()
    store.close()


def test_a_server_that_is_down_costs_a_miss_and_soon_no_time(redis_server: Any, tmp_path: Path) -> None:
    clock = Clock()
    store = RedisStore(redis_server.url, namespace="down", breaker=Breaker(failures=2, cooldown=5, clock=clock))
    chunk = make_chunk(1)
    assert store.put(chunk)
    redis_server.stop()
    assert store.get(chunk.meta.id) is None
    assert store.put(chunk) is False
    for _ in range(200):
        assert store.get(chunk.meta.id) is None
        assert store.meta(chunk.meta.id) is None
        assert list(store.metas()) == []
        assert store.delete(chunk.meta.id) is False
    assert store.put(chunk) is False
    assert store.stats("p").refused == {"unreachable": 2}
    redis_server.start()
    assert store.put(chunk) is False
    clock.now += 6
    assert store.put(chunk) is True
    found = store.get(chunk.meta.id)
    assert found is not None
    assert same_bits(found.tensor, chunk.tensor)
    store.clear()
    store.close()


def test_opening_needs_no_server_and_the_tier_in_front_goes_on(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{probe.getsockname()[1]}"
    store = open_store(tmp_path / "store", redis_url=url)
    store = layer(store, DeltaStore)
    assert isinstance(store.inner, TieredStore)
    assert store.put(make_chunk(1))
    assert store.get(make_chunk(1).meta.id) is not None
    assert [meta.id for meta in store.metas()] == [make_chunk(1).meta.id]
    assert (store.stats().entries, store.stats().hits) == (1, 1)
    store.close()


def test_a_server_that_hangs_costs_its_time_out() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        accepted: list[socket.socket] = []
        thread = threading.Thread(target=lambda: accepted.append(listener.accept()[0]), daemon=True)
        thread.start()
        store = RedisStore(f"redis://127.0.0.1:{listener.getsockname()[1]}", timeout=0.1, breaker=Breaker(failures=1))
        assert store.get("0" * 40) is None
        assert store.get("0" * 40) is None
        assert len(accepted) == 1, "it is not asked again so soon"
        store.close()
        thread.join()
        for connection in accepted:
            connection.close()


def test_disk_over_redis_shares_between_machines(redis_server: Any, tmp_path: Path) -> None:
    one = open_store(tmp_path / "one", redis_url=redis_server.url)
    two = open_store(tmp_path / "two", redis_url=redis_server.url)
    chunk = make_chunk(77)
    assert one.put(chunk)
    found = two.get(chunk.meta.id)
    assert found is not None
    assert same_bits(found.tensor, chunk.tensor)
    two = layer(two, DeltaStore)
    assert isinstance(two.inner, TieredStore)
    assert two.inner.front.meta(chunk.meta.id) is not None
    assert two.clear() >= 1
    one.close()
    two.close()


def test_the_breaker_lets_one_try_and_waits_longer_each_time() -> None:
    clock = Clock()
    breaker = Breaker(failures=2, cooldown=1, longest=3, clock=clock)
    breaker.failed()
    assert breaker.allow()
    breaker.failed()
    assert not breaker.allow()
    for wait in (1.0, 2.0, 3.0, 3.0):
        clock.now += wait - 0.01
        assert not breaker.allow()
        clock.now += 0.02
        assert breaker.allow()
        assert not breaker.allow()
        breaker.failed()
    breaker.succeeded()
    assert breaker.allow()
    breaker.failed()
    assert breaker.allow()


def test_a_purge_that_no_server_answers_says_so() -> None:
    """It must not look like a store in which nothing was found."""
    store = DeltaStore(RedisStore("redis://127.0.0.1:1/0"))
    with pytest.raises(StoreError, match="purge again"):
        purge(store, Selection())
    store.close()
