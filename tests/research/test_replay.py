"""`research.replay`: what must hold for any trace, what is refused, and the commands as a user meets them."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from research.command import app_of
from research.replay.__main__ import replay_trace
from research.replay.generate import BLOCK as GENERATED
from research.replay.generate import generate, write_generated
from research.replay.policies import Belady, Blocks, Infinite, Segments
from research.replay.run import POLICIES, nearest, replay
from research.replay.trace import Call, Trace, read_trace
from typer.testing import CliRunner

from dejakv.errors import DatasetError

BLOCK = 16
Paths = list[tuple[int, ...]]
PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=40)
GOOD = {"timestamp": 5, "input_length": 700, "hash_ids": [1, 2]}


def trace_of(paths: Paths) -> Trace:
    """A trace of prompts that are paths in a tree: equal beginnings are equal blocks."""
    ids: dict[tuple[int, ...], int] = {}
    calls = [
        Call(BLOCK * len(path), tuple(ids.setdefault(path[: n + 1], len(ids)) for n in range(len(path))))
        for path in paths
    ]
    return Trace(tuple(calls), BLOCK)


def held_blocks(cache: Any, trace: Trace) -> int:
    return sum(cache.serve(call) for call in trace.calls)


def test_the_least_used_segment_leaves_and_of_a_prompt_its_end() -> None:
    trace = Trace((Call(32, (1, 2)), Call(32, (1, 2)), Call(16, (3,)), Call(32, (1, 2))), BLOCK)
    lru = Segments(trace, "lru", 32)
    assert [lru.serve(call) for call in trace.calls] == [0, 2, 0, 0]  # one segment: it left as a whole
    lfu = Segments(trace, "lfu", 32)
    assert [lfu.serve(call) for call in trace.calls] == [0, 2, 0, 2]


@settings(deadline=None, max_examples=150)
@given(paths=PATHS, blocks=st.integers(1, 12))
def test_no_policy_holds_more_than_beladys_and_with_room_for_all_everybody_is_infinite(
    paths: Paths, blocks: int
) -> None:
    trace, budget = trace_of(paths), BLOCK * blocks
    room, most = BLOCK * sum(len(path) for path in paths), held_blocks(Infinite(), trace)
    best = held_blocks(Belady(trace, budget), trace)
    assert best <= most
    for cache in (Blocks(trace, budget), *(Segments(trace, policy, budget) for policy in POLICIES)):
        assert held_blocks(cache, trace) <= best
    for cache in (Belady(trace, room), Blocks(trace, room), Segments(trace, "lru", room)):
        assert held_blocks(cache, trace) == most
        assert cache.evictions == 0


def test_the_stores_default_comes_nearest_to_beladys_on_the_documented_trace() -> None:
    calls = tuple(Call(record["input_length"], tuple(record["hash_ids"])) for record in generate(6000))
    found = replay(Trace(calls, 512), ["1%", "5%", "20%"])
    assert found["nearest"] == found["default_policy"]
    rows = {row["policy"]: row for row in found["rows"] if row["budget"] in ("", "5%")}
    assert set(rows) == {"infinite", "belady", "blocks", *POLICIES}
    assert (
        rows["infinite"]["hit_rate"] >= rows["belady"]["hit_rate"] >= rows["lru"]["hit_rate"] > rows["lfu"]["hit_rate"]
    )
    assert rows["lru"]["of_belady"] == rows["lru"]["hit_rate"] / rows["belady"]["hit_rate"]
    assert nearest([{"policy": name, "hit_rate": 0.5} for name in POLICIES]) is None


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_trace_is_read_with_its_block_size(tmp_path: Path) -> None:
    second = {"input_length": 1100, "hash_ids": [1, 3, 4]}
    trace = read_trace(written(tmp_path / "t.jsonl", GOOD, second))
    assert trace.block == 512
    assert trace.sizes == {1: 512, 2: 188, 3: 512, 4: 76}
    assert [trace.reusable(trace.calls[0], held) for held in (0, 1, 2)] == [0, 512, 699]
    assert read_trace(written(tmp_path / "t.jsonl", {"input_length": 40, "hash_ids": [9, 8, 7]})).block == 16


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([], "has no requests"),
        ([GOOD, [1]], "line 2 is not an object"),
        ([{**GOOD, "hash_ids": "1"}], "line 1: hash_ids='1' is no list of different integers"),
        ([{**GOOD, "input_length": 0}], "input_length=0 is no number of tokens"),
        ([GOOD, {**GOOD, "hash_ids": [3, 2]}], "line 2: block 2 follows another block"),
        ([GOOD, {**GOOD, "input_length": 9000}], "no size of"),
    ],
)
def test_a_bad_trace_is_refused(records: list[Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=says):
        read_trace(written(tmp_path / "t.jsonl", *records))


def said(line: str) -> tuple[int, str, str]:
    name, *arguments = shlex.split(line)
    done = CliRunner().invoke(app_of({"replay": replay_trace, "generate": write_generated}[name]), arguments)
    error = f"{done.stderr}{done.exception}" if done.exit_code == 1 else done.stderr
    return done.exit_code, done.stdout, error


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "log.jsonl", *[{"prompt": "one and the same question " * 20}] * 2)
    written(tmp_path / "gap.jsonl", GOOD, {**GOOD, "input_length": 9000})
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "replay.json").write_text("mine")
    return tmp_path


def test_a_trace_is_made_and_replayed(here: Path) -> None:
    assert said("generate t.jsonl --requests 300")[0] == 0
    assert read_trace(here / "t.jsonl").block == GENERATED
    assert (here / "t.jsonl").read_text() == "".join(json.dumps(record) + "\n" for record in generate(300))
    assert generate(300, 1) != generate(300, 2)
    code, out, err = said("replay t.jsonl --budget 5% --budget 100000 --output new")
    assert err == "replaying 300 requests\n"
    assert code == 0
    assert "comes nearest to Belady's" in out
    assert json.loads((here / "new" / "replay.json").read_text())["requests"] == 300
