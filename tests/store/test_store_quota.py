"""A budget in equal parts: what a partition sees follows from its own requests alone."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conftest import rounds

from dejakv import open_store
from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError
from dejakv.store.base import SAVED_TOKENS, SNAPSHOT, RawTensor, StateInfo, StoredState
from dejakv.store.budgets import PartitionBudget, parse_quotas
from dejakv.store.selection import Selection
from dejakv.store.store import Store
from dejakv.testing import make_stored_state

Step = tuple[str, str, int]
REMOVING = ["clear", "purge", "old", "donor"]
STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "put", "get", "delete", *REMOVING]), st.just("b"), st.integers(0, 12)),
    max_size=25,
)
OTHERS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "get", "brief", "sweep", *REMOVING]),
        st.sampled_from(["a", "c"]),
        st.integers(0, 40),
    ),
    max_size=60,
)


def seen(store: Store, steps: list[Step], watched: str) -> list[Any]:
    """All that a partition learns: what its own calls return, and its own figures after each."""
    noted: list[Any] = []
    for action, partition, number in steps:
        stored_state = make_stored_state(number, partition=partition, nbytes=500 + 100 * (number % 4), created=1.0)
        returned: Any = None
        match action:
            case "put":
                returned = store.put(stored_state)
            case "brief":  # its time is over at once
                store.put(make_stored_state(number, partition=partition, nbytes=600, created=1.0, ttl=1.0))
            case "get":
                returned = store.get(stored_state.meta.id) is not None
            case "delete":
                returned = store.delete(stored_state.meta.id)
            case "clear":
                returned = store.clear(partition)
            case "purge":
                returned = store.purge(Selection(partition))
            case "old":
                returned = store.purge(Selection(partition, older_than=0.0))
            case "donor":
                returned = store.purge(Selection(partition, donors=(stored_state.meta.id,)))
            case _:
                store.sweep()
        if partition == watched:
            noted.append((returned, store.stats(watched), sorted(meta.id for meta in store.metas(watched))))
    return noted


def mixed(own: list[Step], others: list[Step]) -> list[Step]:
    """The others' steps spread between one's own."""
    pace = len(others) // (len(own) + 1) + 1
    steps: list[Step] = []
    for number, step in enumerate(own):
        steps += others[number * pace : (number + 1) * pace]
        steps.append(step)
    return steps


@pytest.mark.parametrize("limits", [{"max_entries": 12}, {"max_bytes": 24_000}])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@rounds(40)
@given(own=STEPS, others=OTHERS)
def test_others_change_nothing_that_a_partition_sees(
    own: list[Step], others: list[Step], policy: Any, limits: dict[str, int]
) -> None:
    alone = open_store(None, partitions=3, policy=policy, **limits)
    among = open_store(None, partitions=3, policy=policy, **limits)
    assert seen(among, mixed(own, others), "b") == seen(alone, own, "b")


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(own=STEPS, others=OTHERS)
def test_on_disk_too(own: list[Step], others: list[Step], tmp_path_factory: pytest.TempPathFactory) -> None:
    limits: dict[str, Any] = {"partitions": 3, "max_entries": 12, "max_bytes": 60_000, "memory_bytes": 12_000}
    alone = open_store(tmp_path_factory.mktemp("alone"), **limits)
    among = open_store(tmp_path_factory.mktemp("among"), **limits)
    assert seen(among, mixed(own, others), "b") == seen(alone, own, "b")
    alone.close()
    among.close()


def test_one_budget_for_all_would_tell() -> None:
    """The check above can fail: without parts, another's puts are read off one's own figures."""
    own: list[Step] = [("put", "b", number) for number in range(12)] + [("get", "b", 0)]
    others: list[Step] = [("put", "a", number) for number in range(12)]
    alone, among = open_store(None, max_entries=12), open_store(None, max_entries=12)
    assert seen(among, mixed(own, others), "b") != seen(alone, own, "b")


@pytest.mark.parametrize("max_bytes", [0, 30_000])
@pytest.mark.parametrize("max_entries", [0, 9])
def test_the_parts_together_are_the_budget(tmp_path: Path, max_bytes: int, max_entries: int) -> None:
    store = open_store(tmp_path, partitions=3, max_bytes=max_bytes, max_entries=max_entries)
    for number in range(30):
        assert store.put(make_stored_state(number, partition="abc"[number % 3], nbytes=800))
    inner = store.stats()
    assert set(inner.evictions) <= {"quota"}
    assert not max_bytes or inner.bytes <= max_bytes
    assert inner.entries == (9 if max_entries and not max_bytes else inner.entries)
    assert store.stats("a").evictions.get("quota", 0) == (10 - store.stats("a").entries)
    store.close()


def test_what_another_process_stores_counts(tmp_path: Path) -> None:
    one, other = (open_store(tmp_path, partitions=2, max_entries=8) for _ in range(2))
    for number in range(8):
        assert (one, other)[number % 2].put(make_stored_state(number))
    assert one.put(make_stored_state(9))
    assert one.stats("p").entries == 4
    one.close()
    other.close()


def test_fewer_entries_than_partitions() -> None:
    with pytest.raises(ConfigError, match="no part for each of 4"):
        open_store(None, partitions=4, max_entries=3)
    with pytest.raises(ConfigError, match="no part for each of 4"):
        SemanticCacheConfig(partitions=4, max_cached_blocks=3)


QUOTAS = ("b=12000:5",)


@rounds(40)
@given(own=STEPS, others=OTHERS)
def test_others_change_nothing_for_a_partition_with_a_quota_either(own: list[Step], others: list[Step]) -> None:
    limits: dict[str, Any] = {"partitions": 3, "max_bytes": 24_000, "max_entries": 12, "quotas": QUOTAS}
    alone, among = open_store(None, **limits), open_store(None, **limits)
    assert seen(among, mixed(own, others), "b") == seen(alone, own, "b")
    theirs = [(action, "b" if partition == "a" else "c", number) for action, partition, number in others]
    alone, among = open_store(None, **limits), open_store(None, **limits)
    mine = [(action, "a", number) for action, _, number in own]
    assert seen(among, mixed(mine, theirs), "a") == seen(alone, mine, "a")


def test_named_partitions_have_what_they_are_given_and_the_others_share_the_rest(tmp_path: Path) -> None:
    store = open_store(tmp_path, partitions=3, max_entries=12, quotas=["large=0:8"], memory_bytes=100_000)
    for number in range(20):
        for partition in ("large", "a", "b"):
            assert store.put(make_stored_state(number, partition=partition))
    assert [store.stats(partition).entries for partition in ("large", "a", "b")] == [8, 2, 2]
    store.close()


@pytest.mark.parametrize(
    ("quotas", "says"),
    [
        (["a"], "give NAME=BYTES"),
        (["a=x"], "give NAME=BYTES"),
        (["a=1:2:3"], "give NAME=BYTES"),
        (["a=-1"], "give NAME=BYTES"),
        (["a=1", "a=2"], "two quotas"),
        (["a=1", "b=1", "c=1"], "count them too"),
        (["a=1000"], "no part for each of 2"),
        (["a=1001", "b=1"], "no part for each of 2"),
    ],
)
def test_quotas_that_are_none(quotas: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_store(None, partitions=2, max_bytes=1000, quotas=quotas)
    with pytest.raises(ConfigError, match=says):
        SemanticCacheConfig(partitions=2, max_bytes=1000, quotas=tuple(quotas))


def test_a_name_may_have_any_sign() -> None:
    assert parse_quotas(["a=b:c=5:6"]) == {"a=b:c": PartitionBudget(5, 6)}


def put_snapshot(store: Store, number: int, saved_tokens: int, partition: str = "p") -> bool:
    tensor = RawTensor(np.zeros(2000, np.uint8), "U8")
    meta = StateInfo(
        f"snapshot-{number}-00", partition, "e", (), "", "", kind=SNAPSHOT,
        position=1000 + number, metadata={SAVED_TOKENS: saved_tokens},
    )  # fmt: skip
    return store.put(StoredState(meta, tensor))


def snapshots(store: Store, partition: str = "p") -> list[int]:
    return sorted(int(id.split("-")[1]) for id in store.snapshots(partition, "e"))


@pytest.mark.parametrize("on_disk", [False, True])
def test_snapshots_have_a_part_of_the_budget_and_those_that_save_most_stay(tmp_path: Path, on_disk: bool) -> None:
    place = tmp_path if on_disk else None
    with closing(open_store(place, max_bytes=40_000, snapshot_share=0.25)) as store:
        assert store.put(make_stored_state(1, nbytes=8000))
        for number, saved_tokens in enumerate((900, 20, 300, 900)):
            assert put_snapshot(store, number, saved_tokens)
        # Three have room: the prompt stays, and of the snapshots what saves least has left.
        assert snapshots(store) == [0, 2, 3]
        assert store.stats().evictions == {"snapshots": 1}
        # What is used stays before what would save as much, and what is old leaves at last.
        for _ in range(6):
            assert store.get("snapshot-2-00") is not None
        store.flush()
        for number in range(4, 7):
            assert put_snapshot(store, number, 900)
        assert 2 in snapshots(store)
        assert 0 not in snapshots(store)
        assert len(list(store.metas())) == 4


def test_each_partition_evicts_its_own_snapshots() -> None:
    with closing(open_store(max_bytes=40_000, partitions=2, snapshot_share=0.25)) as store:
        assert put_snapshot(store, 0, 100, "a")
        for number in range(1, 4):
            assert put_snapshot(store, number, 900, "b")
        assert (snapshots(store, "a"), len(snapshots(store, "b"))) == ([0], 1)


def test_a_share_of_snapshots_that_is_none() -> None:
    with pytest.raises(ConfigError, match="snapshot_share"):
        open_store(snapshot_share=1.5)
    # Without room for one none is stored, and nothing else leaves for it.
    with closing(open_store(max_bytes=20_000, snapshot_share=0)) as store:
        assert store.put(make_stored_state(1, nbytes=4000))
        assert not put_snapshot(store, 0, 900)
        assert store.stats().refused == {"too_large": 1}
        assert len(list(store.metas())) == 1
