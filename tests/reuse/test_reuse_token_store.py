"""The online store of prompts: order of leaving, search, refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.blend.token_store import CacheItem, LRUCacheStore, key_of
from dejakv.errors import ConfigError, InputError
from dejakv.store.base import Tensor


def item(number: int, tokens: int = 4, partition: str = "default", epoch: str = "e") -> CacheItem:
    vector = np.zeros(8, dtype=np.float32)
    vector[number % 8] = 1.0
    ids = tuple(range(number, number + tokens))
    kv = Tensor(np.full((2, 1, 1, tokens, 4), number, dtype=np.float32), "F32")
    return CacheItem(key_of(partition, ids), f"prompt {number}", ids, vector, kv, partition=partition, epoch=epoch)


@settings(max_examples=40, deadline=None)
@given(
    actions=st.lists(st.tuples(st.sampled_from(["put", "get"]), st.integers(0, 6)), max_size=40),
    limit=st.integers(1, 4),
)
def test_the_least_recently_used_leaves_first(actions, limit):
    store, model = LRUCacheStore(limit), []
    for action, number in actions:
        one = item(number)
        if action == "put":
            store.put(one)
            model = [k for k in model if k != one.key] + [one.key]
            model = model[-limit:]
        else:
            assert (store.get(one.key) is not None) == (one.key in model)
            if one.key in model:
                model = [k for k in model if k != one.key] + [one.key]
        assert [held.key for held in store.items()] == model


def test_search_takes_the_nearest_above_the_threshold():
    store = LRUCacheStore()
    for number in range(3):
        store.put(item(number))
    near = np.array([0.2, 1.0, 0, 0, 0, 0, 0, 0], dtype=np.float32)
    found = store.search(near, 0.8)
    assert found is not None
    assert found[0].prompt == "prompt 1"
    assert found[1] == pytest.approx(0.98058, abs=1e-4)
    assert [held.prompt for held in store.items()] == ["prompt 0", "prompt 2", "prompt 1"]
    assert store.search(near, 0.99) is None
    assert store.search(-near, -1.0) is not None


def test_keys_look_like_p_and_differ_by_partition():
    assert key_of("a", (1, 2)).startswith("p")
    assert key_of("a", (1, 2)) != key_of("b", (1, 2))
    assert key_of("a", (1, 2)) == key_of("a", (1, 2))


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match="at least 1 item"):
        LRUCacheStore(0)
    store = LRUCacheStore(epoch="e")
    with pytest.raises(InputError, match="another partition or model"):
        store.put(item(1, partition="b"))
    with pytest.raises(InputError, match="another partition or model"):
        store.put(item(1, epoch="f"))
    store.put(item(1))
    with pytest.raises(ConfigError, match="no cosine"):
        store.search(item(1).embedding, 1.5)
    with pytest.raises(InputError, match="cannot be compared"):
        store.search(np.ones(3, dtype=np.float32), 0.5)
    assert store.get("p0000000000000000") is None
