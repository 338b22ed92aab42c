"""The replay: what must hold for any trace."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from research.replay.generate import generate
from research.replay.policies import Belady, Blocks, Infinite, Segments
from research.replay.run import POLICIES, budget_of, nearest, replay
from research.replay.trace import Call, Trace

from dejakv.errors import ConfigError

BLOCK = 16
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


def test_the_least_used_segment_leaves_and_of_a_prompt_its_end() -> None:
    trace = Trace((Call(32, (1, 2)), Call(32, (1, 2)), Call(16, (3,)), Call(32, (1, 2))), BLOCK)
    lru = Segments(trace, "lru", 32)
    assert [lru.serve(call) for call in trace.calls] == [0, 2, 0, 0]  # one segment: it left as a whole
    lfu = Segments(trace, "lfu", 32)
    assert [lfu.serve(call) for call in trace.calls] == [0, 2, 0, 2]


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
        *(Segments(trace, policy, budget) for policy in POLICIES),
    ):
        assert held_blocks(cache, trace) <= best


@settings(deadline=None, max_examples=60)
@given(paths=PATHS)
def test_with_room_for_all_everybody_is_infinite(paths: Paths) -> None:
    trace = trace_of(paths)
    room = BLOCK * sum(len(path) for path in paths)
    wanted = held_blocks(Infinite(), trace)
    for cache in (Belady(trace, room), Blocks(trace, room), Segments(trace, "lru", room)):
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
