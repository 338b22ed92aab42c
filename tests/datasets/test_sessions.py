"""Conversations replayed: which requests are made of one, how histories are cut, and which logs are read."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dejakv.datasets.messages import LoggedMessage, read_messages
from dejakv.datasets.registry import DatasetOptions, open_dataset
from dejakv.datasets.sessions import SessionsDataset, compacted, windowed
from dejakv.errors import ConfigError, DatasetError
from dejakv.experiments.samples import SamplePrompter
from dejakv.models import tokenizer_folder

CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "look", "arguments": '{"at": "x"}'}}],
}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    CALL,
    {"role": "tool", "content": "found"},
    {"role": "assistant", "content": "answer one"},
    {"edit": 1, "content": "ONE"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "answer two"},
]
CALLED = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
FOUND = "<tool_response>\nfound\n</tool_response>"


def write(file: Path, content: Any) -> str:
    file.write_text(content if isinstance(content, str) else json.dumps(content) + "\n")
    return str(file)


def test_one_request_for_each_model_call_with_the_history_as_it_was(tmp_path: Path) -> None:
    first, second, third = SessionsDataset(write(tmp_path / "log.jsonl", {"messages": CHAT}))
    assert first.messages == (("system", "Be brief."), ("user", "one"))
    assert first.fields["recorded"] == CALLED
    assert second.messages == (*first.messages, ("assistant", CALLED), ("user", FOUND))
    assert second.question == FOUND
    assert third.messages == (
        ("system", "Be brief."), ("user", "ONE"), ("assistant", CALLED), ("user", FOUND), ("assistant", "answer one"),
        ("user", "two"),
    )  # fmt: skip
    assert third.fields["recorded"] == "answer two"
    assert (third.answer, third.id) == (None, "session-0-2")


def test_a_window_keeps_the_system_message_and_begins_with_a_user() -> None:
    history = [
        LoggedMessage("system", "s"),
        *(LoggedMessage("user" if n % 2 == 0 else "assistant", str(n)) for n in range(9)),
    ]
    assert windowed(history, 0) == history
    assert [m.text for m in windowed(history, 3)] == ["s", "6", "7", "8"]
    assert [m.text for m in windowed(history, 4)] == ["s", "6", "7", "8"]
    assert [m.text for m in windowed(history, 99)] == [m.text for m in history]


def test_older_tool_results_become_one_line() -> None:
    history = [LoggedMessage("user", "q"), *(LoggedMessage("user", str(n) * 50, tool=True) for n in range(4))]
    assert compacted(history, None) == history
    kept = compacted(history, 1)
    assert [m.text for m in kept[1:4]] == ["<tool_response>\n(50 characters, left out)\n</tool_response>"] * 3
    assert kept[4] == history[4]
    assert all("left out" in m.text for m in compacted(history, 0)[1:])
    assert compacted(history, 9) == history


def test_context_moves_with_a_window() -> None:
    """Messages of one request stand in the next one at another place."""
    plain, moved = SessionsDataset(), SessionsDataset(window=4, compact_tools=1)
    assert len(list(plain)) == len(list(moved))
    assert all(len(sample.messages) <= 5 for sample in moved)
    assert any("left out" in text for sample in SessionsDataset(compact_tools=1) for _, text in sample.messages)


def test_sessions_alternate_and_the_seed_says_how() -> None:
    orders = [[sample.id for sample in SessionsDataset(seed=seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])
    numbers = [sample.fields["session"] for sample in SessionsDataset()]
    assert sum(a != b for a, b in pairwise(numbers)) > len(numbers) / 2


def test_the_recorded_set_has_edits_tools_and_the_promised_size() -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder("smollm2-135m"))
    prompter = SamplePrompter(tokenizer, None, "prompt")
    found = list(SessionsDataset(window=8))
    assert len(found) >= 100
    sizes = [len(tokenizer(prompter.prompt(sample))["input_ids"]) for sample in found]
    assert sum(500 <= size <= 2_100 for size in sizes) >= 0.95 * len(sizes)
    sessions = SessionsDataset().sessions
    assert any(message.edits is not None for session in sessions for message in session)
    assert any(message.tool for session in sessions for message in session)


def test_other_peoples_trajectories(tmp_path: Path) -> None:
    """tau-bench's results, SWE-agent's history and trajectory, ShareGPT, parts of content, and calls without text."""
    tau = [{"task_id": 0, "reward": 1.0, "traj": CHAT[:5]}, {"task_id": 1, "traj": CHAT[:3]}]
    assert len(list(SessionsDataset(write(tmp_path / "tau.json", tau)))) == 3
    swe = {
        "history": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "fix it"}]},
            {"role": "assistant", "content": "ls"},
        ]
    }
    (one,) = SessionsDataset(write(tmp_path / "a.traj", swe))
    assert one.messages == (("system", "s"), ("user", "fix it"))
    steps = [
        {"action": "ls", "observation": "a.py", "thought": "look", "response": "look\n```ls```"},
        {"action": "cat a.py", "observation": "", "thought": ""},
    ]
    (second,) = SessionsDataset(write(tmp_path / "b.traj", {"trajectory": steps}))
    assert second.messages == (("assistant", "look\n```ls```"), ("user", "<tool_response>\na.py\n</tool_response>"))
    assert second.fields["recorded"] == "cat a.py"
    shared = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
    (three,) = SessionsDataset(write(tmp_path / "c.json", [shared]))
    assert three.question == "hi"
    (four,) = SessionsDataset(write(tmp_path / "d.json", CHAT[:3]))
    assert four.question == "one"


def test_calls_without_arguments_in_json() -> None:
    odd = {"role": "assistant", "content": "", "function_call": {"name": "run", "arguments": "not json"}}
    found = read_messages({"messages": [{"role": "user", "content": "x"}, odd]}, "here")
    assert found[1].text == '<tool_call>\n{"name": "run", "arguments": {"text": "not json"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"messages": []}', "line 1 has no conversation"),
        ('{"question": "x"}', "line 1 has no conversation"),
        ('{"messages": [1]}', r"messages\[0\] is not a message"),
        ('{"messages": [{"role": "boss", "content": "x"}]}', "role 'boss'"),
        ('{"messages": [{"role": "user", "content": 3}]}', "neither a text nor a list"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no model call"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no model call"),
        ('{"messages": [{"edit": 0, "content": "x"}]}', "edit names message 0, but 0 messages"),
        ('{"messages": [{"role": "user", "content": "x"}, {"edit": "a"}]}', "number of an earlier message as 'edit'"),
        ('{"trajectory": [1]}', "a step of 'trajectory'"),
        ('{"messages": [{"role": "user"', "line 1 is not JSON"),
        ("", "is empty"),
    ],
)
def test_what_is_no_conversation_is_named_by_its_line(content: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=says):
        SessionsDataset(write(tmp_path / "log.jsonl", content))


def test_wrong_files_and_options(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no file"):
        SessionsDataset(str(tmp_path / "none.jsonl"))
    with pytest.raises(DatasetError, match="is not JSON"):
        SessionsDataset(write(tmp_path / "a.json", "{"))
    with pytest.raises(DatasetError, match="item 1 is not an object"):
        SessionsDataset(write(tmp_path / "b.json", [3]))
    with pytest.raises(ConfigError, match="give 0 or more"):
        open_dataset("sessions", DatasetOptions(), {"window": -1})


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"window": 5}, {"compact_tools": 0}])
def test_every_sample_has_an_id_of_its_own(options: dict[str, int]) -> None:
    ids = [sample.id for sample in SessionsDataset(**options)]
    assert len(set(ids)) == len(ids) > 100
    assert ids == [sample.id for sample in SessionsDataset()]
