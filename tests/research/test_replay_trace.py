"""Traces: what is read, and what is refused with the line and the remedy."""

import json
from pathlib import Path
from typing import Any

import pytest
from research.replay.generate import BLOCK, generate
from research.replay.trace import read_trace, write_trace

from dejakv.errors import ConfigError, DatasetError

GOOD = {"timestamp": 5, "input_length": 700, "hash_ids": [1, 2]}


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_trace_is_read_with_its_block_size(tmp_path: Path) -> None:
    second = {"timestamp": 6, "input_length": 1100, "hash_ids": [1, 3, 4]}
    trace = read_trace(written(tmp_path / "t.jsonl", GOOD, second))
    assert trace.block == 512
    assert trace.sizes == {1: 512, 2: 188, 3: 512, 4: 76}
    assert [trace.reusable(trace.calls[0], held) for held in (0, 1, 2)] == [0, 512, 699]


def test_blocks_of_vllm_are_found_too(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t.jsonl", {"input_length": 40, "hash_ids": [9, 8, 7]}))
    assert (trace.block, trace.calls[0].time) == (16, None)


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([], "has no requests"),
        ([GOOD, [1]], "line 2 is not an object"),
        ([{**GOOD, "hash_ids": "1"}], "line 1: hash_ids='1' is no list of integers"),
        ([{**GOOD, "hash_ids": [1, True]}], "no list of integers"),
        ([{**GOOD, "input_length": 0}], "input_length=0 is no number of tokens"),
        ([{**GOOD, "input_length": 700.5}], "no number of tokens"),
        ([{"input_length": 700}], "hash_ids=None"),
        ([{**GOOD, "timestamp": "noon"}], "timestamp='noon' is no time"),
        ([GOOD, {**GOOD, "timestamp": 4}], "line 2: timestamp 4 is before the last one, 5"),
        ([{**GOOD, "hash_ids": [1, 1]}], "a block occurs twice"),
        ([GOOD, {**GOOD, "hash_ids": [3, 2]}], "line 2: block 2 follows block 3, and block 1 in an earlier request"),
        ([GOOD, {**GOOD, "hash_ids": [2, 5]}], "block 2 follows the beginning, and block 1"),
        ([GOOD, {**GOOD, "input_length": 9000}], "no size of blocks"),
    ],
)
def test_a_bad_trace_is_refused(records: list[Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=says):
        read_trace(written(tmp_path / "t.jsonl", *records))


def test_a_gap_is_named_by_its_line(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", GOOD, {**GOOD, "input_length": 9000})
    with pytest.raises(DatasetError, match="line 2: 2 hash_ids for 9000 tokens do not fit blocks of 512"):
        read_trace(path, 512)


def test_the_generator_writes_what_the_reader_takes(tmp_path: Path) -> None:
    records = generate(2000, seed=3)
    write_trace(tmp_path / "t.jsonl", records)
    trace = read_trace(tmp_path / "t.jsonl")
    assert (len(trace.calls), trace.block) == (2000, BLOCK)
    assert records == generate(2000, seed=3) != generate(2000, seed=4)
    assert set(records[0]) == {"timestamp", "input_length", "output_length", "hash_ids"}


def test_a_trace_is_not_written_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        write_trace(tmp_path / "t.jsonl", generate(2))
    assert (tmp_path / "t.jsonl").read_text() == "mine"
