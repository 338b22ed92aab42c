"""The budgets of partitions, and what many entries cost; what leaves first is compared with a reference in
`test_encoder_cache_model.py`."""

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.encoder_cache import QueueingController, VisualEmbeddingBlock, VisualKVCache
from dejakv.store.budgets import PartitionBudget, PartitionBudgets


def picture(rows=1):
    return np.zeros((rows, 1))


class Minimum(QueueingController):
    def __init__(self, blocks):
        self.blocks = blocks

    def get_minimum_stable_blocks(self):
        return self.blocks


def test_parts_share_the_minimum():
    cache = VisualKVCache(6, parts=PartitionBudgets(2), queueing_controller=Minimum(4))
    for partition in "ab":
        for number in range(2):
            cache.view("e", partition).store(str(number), "image", picture())
    cache.queueing_controller.blocks = 6
    assert cache.view("e", "a").store("2", "image", picture()) is not None
    assert cache.view("e", "a").store("3", "image", picture()) is None
    cache.queueing_controller.blocks = 5
    assert cache.view("e", "a").store("3", "image", picture()) is not None


def test_an_eviction_counts_for_the_partition_whose_output_left():
    cache = VisualKVCache(max_entries=1)
    for partition in "pq":
        cache.view("e", partition).store("h", "image", picture())
    assert [cache.stats(partition).evictions for partition in "pq"] == [{"entries": 1}, {}]


def test_memory_does_not_grow_with_entries_that_left():
    cache = VisualKVCache(max_entries=100)
    for number in range(5000):
        cache.store(str(number % 50), "image", picture())
    assert sum(type(one) is VisualEmbeddingBlock for one in gc.get_objects()) < 500


STEPS = st.lists(st.tuples(st.sampled_from(["get", "get", "clear"]), st.integers(0, 9)), max_size=30)
PARTS = PartitionBudgets(3, 1000, named={"b": PartitionBudget(500)})


def step(cache: VisualKVCache, partition: str, action: str, number: int) -> Any:
    view, content = cache.view("e", partition), f"{number:064x}"
    output = np.full((1 + number % 3, 25), number, np.float32)
    if action == "get":
        return view.get_or_compute(content, "image", lambda: output).tolist()
    return view.clear()


def seen(cache: VisualKVCache, own: Any, others: Any, partition: str) -> list[Any]:
    noted: list[Any] = []
    for place, (action, number) in enumerate(own):
        for other in others[place::7]:
            step(cache, "a" if partition == "b" else "b", *other)
        noted.append((step(cache, partition, action, number), _figures(cache, partition)))
    return noted


def _figures(cache: VisualKVCache, partition: str) -> dict[str, Any]:
    figures = cache.get_cache_stats(partition)
    return {name: value for name, value in figures.items() if "seconds" not in name and "ms" not in name}


@settings(deadline=None)
@given(own=STEPS, others=STEPS, partition=st.sampled_from("ab"), policy=st.sampled_from(["lfu", "lru"]))
def test_others_change_nothing_that_a_partition_sees(own: Any, others: Any, partition: str, policy: Any) -> None:
    alone, among = (VisualKVCache(30, 1600, policy=policy, parts=PARTS) for _ in range(2))
    assert seen(among, own, others, partition) == seen(alone, own, [], partition)


def test_one_budget_for_all_would_tell() -> None:
    own, others = [("get", number) for number in range(8)] * 2, [("get", number) for number in range(9)] * 5
    alone, among = (VisualKVCache(30, 1600) for _ in range(2))
    assert seen(among, own, others, "b") != seen(alone, own, [], "b")


@pytest.mark.parametrize(("partition", "held"), [("a", 4), ("b", 8)])
def test_parts_are_in_proportion(partition: str, held: int) -> None:
    cache = VisualKVCache(100, 1600, parts=PARTS)
    for number in range(20):
        cache.view("e", partition).store(f"{number:064x}", "image", np.ones((1, 25), np.float32))
    assert cache.stats(partition).entries == held
    assert cache.stats().entries == held
    assert cache.stats().bytes == held * 100


def test_epochs_partitions_and_modalities_are_apart() -> None:
    cache = VisualKVCache()
    cache.view("e", "p").store("h", "image", picture())
    assert cache.view("e", "q").lookup("h") is None
    assert cache.view("f", "p").lookup("h") is None
    assert cache.view("e", "p").lookup("h", "video") is None
    assert cache.view("e", "p").lookup("h") is not None
