"""The cache of tasks: a level and a store in terms of tasks."""

import threading

import numpy as np
import pytest
import torch

from dejakv.errors import ConfigError, InputError
from dejakv.prototypes.lsh import LSHIndex
from dejakv.prototypes.sim_llm import InterTaskKVManager, TaskCacheEntry
from dejakv.store.open import open_store


def kv(fill=1.0, tokens=3):
    return torch.full((1, 2, tokens, 4), fill), torch.full((1, 2, tokens, 4), -fill)


def unit(*numbers):
    vector = np.zeros(8, np.float32)
    vector[: len(numbers)] = numbers
    return vector


@pytest.fixture
def manager():
    return InterTaskKVManager(8, max_cache_size=3, similarity_threshold=0.8, device="cpu")


def test_a_similar_task_is_found_with_its_state(manager):
    manager.add_task("one", unit(1), kv(5.0), token_ids=(1, 2, 3))
    found = manager.search_similar_task(torch.tensor(unit(1, 0.1)))
    assert isinstance(found, TaskCacheEntry)
    assert (found.task_id, found.token_ids, found.tokens) == ("one", (1, 2, 3), 3)
    assert found.similarity == pytest.approx(1 / 1.01**0.5, abs=1e-5)
    assert torch.equal(found.top_layer_kv[0], kv(5.0)[0])
    assert torch.equal(found.top_layer_kv[1], kv(5.0)[1])
    assert found.lsh_hash == LSHIndex(8).compute_hash(unit(1))


def test_a_dissimilar_task_is_a_miss_and_the_threshold_decides(manager):
    manager.add_task("one", unit(1), kv())
    assert manager.search_similar_task(unit(1, 1)) is None
    manager.similarity_threshold = 0.7
    assert manager.search_similar_task(unit(1, 1)) is not None
    counted = manager.get_statistics()
    assert (counted["hits"], counted["misses"], counted["hit_rate"]) == (1, 1, 0.5)


def test_the_least_recently_used_task_leaves(manager):
    for i in range(3):
        manager.add_task(f"t{i}", unit(*[0] * i, 1), kv())
    assert manager.search_similar_task(unit(1)).task_id == "t0"
    manager.add_task("t3", unit(0, 0, 0, 1), kv())
    assert manager.search_similar_task(unit(0, 1)) is None
    assert manager.search_similar_task(unit(1)).task_id == "t0"
    assert manager.get_statistics()["evictions"] == 1


def test_a_task_of_the_same_id_is_replaced(manager):
    manager.add_task("one", unit(1), kv(1.0))
    manager.add_task("one", unit(0, 1), kv(2.0))
    assert manager.search_similar_task(unit(1)) is None
    assert manager.search_similar_task(unit(0, 1)).top_layer_kv[0].unique().item() == 2.0


def test_tasks_of_another_model_or_partition_are_never_found():
    store = open_store()
    make = {"max_cache_size": 3, "device": "cpu", "store": store}
    one = InterTaskKVManager(8, epoch="a", **make)
    one.add_task("one", unit(1), kv())
    assert InterTaskKVManager(8, epoch="b", **make).search_similar_task(unit(1)) is None
    assert InterTaskKVManager(8, epoch="a", partition="other", **make).search_similar_task(unit(1)) is None
    assert InterTaskKVManager(8, epoch="a", **make).search_similar_task(unit(1)).task_id == "one"


def test_reset_forgets_this_partition_alone():
    store = open_store()
    mine = InterTaskKVManager(8, device="cpu", store=store)
    theirs = InterTaskKVManager(8, device="cpu", store=store, partition="other")
    for manager in (mine, theirs):
        manager.add_task("one", unit(1), kv())
    mine.reset()
    assert mine.search_similar_task(unit(1)) is None
    assert theirs.search_similar_task(unit(1)) is not None
    assert mine.get_statistics()["hits"] == 0


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"max_cache_size": 0}, "max_cache_size=0"),
        ({"similarity_threshold": 1.5}, "similarity_threshold=1.5"),
        ({"similarity_threshold": float("nan")}, "similarity_threshold=nan"),
        ({"similarity_threshold": "high"}, "similarity_threshold='high'"),
        ({"num_hyperplanes": 0}, "num_hyperplanes=0"),
        ({"embedding_dim": 0}, "embedding_dim=0"),
    ],
)
def test_settings_out_of_range_name_the_remedy(settings, cause):
    with pytest.raises(ConfigError, match=cause):
        InterTaskKVManager(**{"embedding_dim": 8, "device": "cpu", **settings})


def test_an_embedding_of_the_wrong_size_is_refused(manager):
    with pytest.raises(ConfigError, match="dimension 8"):
        manager.search_similar_task(np.ones(9, np.float32))
    with pytest.raises(ConfigError, match="dimension 8"):
        manager.add_task("one", np.ones(7, np.float32), kv())


def test_state_of_another_shape_is_refused(manager):
    with pytest.raises(InputError, match="for a task of 5 tokens"):
        manager.add_task("one", unit(1), kv(tokens=3), token_ids=(1, 2, 3, 4, 5))
    with pytest.raises(InputError, match="equal shape"):
        manager.add_task("one", unit(1), (kv()[0], kv(tokens=2)[1]))


def test_threads_add_search_and_reset(manager):
    failed = []

    def work(seed):
        draw = np.random.default_rng(seed)
        try:
            for i in range(60):
                manager.add_task(f"{seed}/{i}", draw.standard_normal(8), kv(float(i)))
                manager.search_similar_task(draw.standard_normal(8))
                if i % 20 == 19:
                    manager.reset()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert manager.get_statistics()["entries"] <= 3
    assert len(manager) == manager.get_statistics()["entries"]
