"""The replay against the real store, and against what must hold for any trace."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.errors import ConfigError
from dejakv.experiments.replay.generate import generate
from dejakv.experiments.replay.policies import Belady, Blocks, Chunks, Infinite
from dejakv.experiments.replay.run import budget_of, nearest, replay
from dejakv.experiments.replay.trace import Call, Trace
from dejakv.identity import exact_key
from dejakv.store.base import Chunk, ChunkMeta, Tensor
from dejakv.store.deltas import DeltaStore
from dejakv.store.eviction import POLICIES
from dejakv.store.memory import MemoryStore
from dejakv.store.prefix import PrefixIndex

BLOCK = 16
ROW = 4096
"""Bytes of a token's state: so many that those of all ids together are less than half a block's."""
Paths = list[tuple[int, ...]]
PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=40)


def trace_of(paths: Paths) -> Trace:
    """A trace of prompts that are paths in a tree: equal beginnings are equal blocks."""
    ids: dict[tuple[int, ...], int] = {}
    calls = [
        Call(BLOCK * len(path), tuple(ids.setdefault(path[: n + 1], len(ids)) for n in range(len(path))))
        for path in paths
    ]
    return Trace(tuple(calls), BLOCK)


def in_the_store(paths: Paths, policy: Any, blocks: int) -> list[int]:
    """Tokens that the real store and prefix index have of each prompt. There is room to spare for the ids, less than a block."""
    store = DeltaStore(MemoryStore(ROW * (BLOCK * blocks + BLOCK // 2), policy=policy))
    prefixes = PrefixIndex(store)
    store.on_evict(prefixes.remove)
    held: list[int] = []
    for path in paths:
        ids = tuple(itertools.chain.from_iterable([step] * BLOCK for step in path))
        own = exact_key("default", "e", ids, [])
        if store.get(own) is not None:
            held.append(len(ids) - 1)
            continue
        hit = prefixes.longest("default", "e", ids)
        held.append(hit.tokens if hit else 0)
        if hit:
            assert store.get_parts(hit.donor, [(0, hit.tokens)]) is not None
        meta = ChunkMeta(own, "default", "e", ids, "", "")
        if store.put(Chunk(meta, Tensor(np.zeros((2, 1, 1, len(ids), ROW // 2), np.uint8), "U8"))):
            prefixes.add(meta)
    return held


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=80)
@given(paths=PATHS, blocks=st.integers(1, 12))
def test_a_replay_hits_what_the_store_hits(policy: str, paths: Paths, blocks: int) -> None:
    trace = trace_of(paths)
    cache = Chunks(trace, POLICIES[policy], BLOCK * blocks)
    assert [trace.reusable(call, cache.serve(call)) for call in trace.calls] == in_the_store(paths, policy, blocks)


def held_blocks(cache: Any, trace: Trace) -> int:
    return sum(cache.serve(call) for call in trace.calls)


@settings(deadline=None, max_examples=150)
@given(paths=PATHS, blocks=st.integers(1, 12))
def test_no_policy_holds_more_than_beladys_and_none_more_than_the_infinite(paths: Paths, blocks: int) -> None:
    trace, budget = trace_of(paths), BLOCK * blocks
    best = held_blocks(Belady(trace, budget), trace)
    assert best <= held_blocks(Infinite(), trace)
    for cache in (
        Blocks(trace, budget),
        *(Chunks(trace, policy, budget) for policy in POLICIES.values()),
    ):
        assert held_blocks(cache, trace) <= best


@settings(deadline=None, max_examples=60)
@given(paths=PATHS)
def test_with_room_for_all_everybody_is_infinite(paths: Paths) -> None:
    trace = trace_of(paths)
    room = BLOCK * sum(len(path) for path in paths)
    wanted = held_blocks(Infinite(), trace)
    for cache in (Belady(trace, room), Blocks(trace, room), Chunks(trace, POLICIES["lru"], room)):
        assert held_blocks(cache, trace) == wanted
        assert cache.evictions == 0


def test_the_figures_of_a_replay() -> None:
    records = generate(1500, seed=1)
    calls = tuple(Call(r["input_length"], tuple(r["hash_ids"]), r["timestamp"]) for r in records)
    found = replay(Trace(calls, 512), ["5%"], bytes_per_token=1000)
    rows = {row["policy"]: row for row in found["rows"]}
    assert set(rows) == {"infinite", "belady", "blocks", *POLICIES}
    assert (
        rows["infinite"]["hit_rate"]
        >= rows["belady"]["hit_rate"]
        == max(row["hit_rate"] for name, row in rows.items() if name != "infinite")
    )
    assert rows["lru"]["budget_bytes"] == 1000 * rows["lru"]["budget_tokens"]
    assert len(rows["lru"]["over_time"]) == 20
    assert found["nearest"] == max(POLICIES, key=lambda name: rows[name]["hit_rate"])


def test_the_stores_default_comes_nearest_to_beladys_on_the_documented_trace() -> None:
    records = generate(6000)
    calls = tuple(Call(r["input_length"], tuple(r["hash_ids"]), r["timestamp"]) for r in records)
    found = replay(Trace(calls, 512))
    assert found["nearest"] == found["default_policy"]


def test_equal_policies_decide_nothing() -> None:
    assert nearest([{"policy": name, "hit_rate": 0.5} for name in POLICIES]) is None


def test_budgets() -> None:
    assert budget_of("5%", 1000) == 50
    assert budget_of("70", 1000) == 70
    for wrong in ("0", "-1", "0%", "101%", "x", "nan%", "inf%", "1.5", "%", ""):
        with pytest.raises(ConfigError, match="--budget"):
            budget_of(wrong, 1000)
