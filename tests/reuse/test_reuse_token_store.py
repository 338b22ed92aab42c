"""The online store of prompts: order of leaving, refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.errors import ConfigError
from dejakv.prototypes.token_store import CacheItem, LRUCacheStore
from dejakv.store.base import RawTensor, StateInfo, StoredState


def item(number: int) -> CacheItem:
    kv = RawTensor(np.full((2, 1, 1, 4, 4), number, dtype=np.float32), "F32")
    meta = StateInfo(f"key {number}", "default", "e", tuple(range(number, number + 4)), "prompt", "prompt")
    return CacheItem(StoredState(meta, kv), np.ones(8, dtype=np.float32))


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


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match="at least 1 item"):
        LRUCacheStore(0)
    assert LRUCacheStore().get("unknown") is None
