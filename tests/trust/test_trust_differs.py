"""What a wrong answer is."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejakv.errors import ConfigError, InputError
from dejakv.request import Request
from dejakv.trust.differs import Seen, ToolCall, differs_of, tool_calls

ASKED = Request("r", "prompt", "chunk")


def seen(text: str = "", *ids: int, probabilities: Sequence[float] | None = None) -> Seen:
    logs = None if probabilities is None else np.log(np.array([probabilities], np.float32))
    return Seen(text, ids, lambda _: logs)


def wrong(differs: str, full: Seen, reused: Seen) -> bool:
    return differs_of(differs).wrong(ASKED, full, reused)


def test_first_looks_at_the_first_token_alone() -> None:
    assert not wrong("first", seen("a b", 1, 2), seen("a c", 1, 3))
    assert wrong("first", seen("a b", 1, 2), seen("c b", 3, 2))
    assert wrong("first", seen("a", 1), seen(""))
    assert not wrong("first", seen(""), seen(""))


def test_answer_looks_at_the_whole_text() -> None:
    assert not wrong("answer", seen("a b", 1, 2), seen("a b", 1, 2))
    assert wrong("answer", seen("a b", 1, 2), seen("a c", 1, 3))


def test_tool_looks_at_calls_and_leaves_prose_alone() -> None:
    call, same, other = (f'{{"name": "{name}", "arguments": {{{inside}}}}}' for name, inside in
        (("w", '"a": 1, "b": 2'), ("w", '"b": 2, "a": 1'), ("w", '"a": 1, "b": 3')))  # fmt: skip
    assert not wrong("tool", seen(call), seen(f"Well: <tool_call>{same}</tool_call>"))
    assert wrong("tool", seen(call), seen(other))
    assert wrong("tool", seen(call), seen("I cannot do that."))
    assert wrong("tool", seen("I cannot do that."), seen(call))
    assert not wrong("tool", seen("one prose"), seen("another"))


def test_kl_looks_at_the_first_distribution() -> None:
    even, near, far = ((0.5, 0.5), (0.6, 0.4), (0.99, 0.01))
    assert not wrong("kl:0.05", seen("", 0, probabilities=even), seen("", 0, probabilities=near))
    assert wrong("kl:0.05", seen("", 0, probabilities=even), seen("", 0, probabilities=far))
    assert wrong("kl:0.05", seen("", 0, probabilities=even), seen("", 0, probabilities=(float("nan"), 0.5)))


def test_kl_of_an_engine_without_logits_is_an_error_and_none_of_nothing() -> None:
    with pytest.raises(InputError, match="log probabilities"):
        wrong("kl:0.05", seen("", 0), seen("", 0))


@pytest.mark.parametrize(
    "text", ["", "second", "kl", "kl:", "kl:0", "kl:-1", "kl:nan", "kl:inf", "kl:x", ":f", "module:", "first:1"]
)
def test_an_unknown_way_to_differ_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(ConfigError, match="--differs"):
        differs_of(text)


def test_a_function_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def judge(request: Request, full: str, reused: str) -> int:
        told.append((request, full, reused))
        return 1

    monkeypatch.setattr(sys.modules[__name__], "judge", judge, raising=False)
    assert wrong(f"{__name__}:judge", seen("a"), seen("b")) is True
    assert told == [(ASKED, "a", "b")]


@pytest.mark.parametrize("text", ["no_such_module_of_anybody:f", "dejakv.request:no_such_function", "math:pi"])
def test_one_that_cannot_be_had_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="--differs"):
        differs_of(text)


def test_how_long_answers_must_be() -> None:
    assert [differs_of(text).tokens for text in ("first", "kl:1", "answer", "tool", f"{__name__}:seen")] == [
        1, 1, None, None, None,
    ]  # fmt: skip
    assert [differs_of(text).logits for text in ("first", "kl:1")] == [False, True]


CALL = '{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}'
OTHER_ORDER = '{"arguments": {"days": 2, "city": "Bonn"}, "name": "weather"}'
READ = (ToolCall("weather", '{"city": "Bonn", "days": 2}'),)


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        OTHER_ORDER,
        f"[{CALL}]",
        f"I look it up. <tool_call>\n{CALL}\n</tool_call>",
        f"<tool_call>{OTHER_ORDER}</tool_call> and then?",
        f"```json\n{CALL}\n```",
        f"[TOOL_CALLS] [{CALL}]",
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Bonn", "days": 2}}',
        json.dumps({"tool_calls": [{"type": "function", "function": json.loads(CALL)}]}),
        '{"name": "weather", "arguments": "{\\"days\\": 2, \\"city\\": \\"Bonn\\"}"}',
    ],
)
def test_one_call_in_many_spellings(text: str) -> None:
    assert tool_calls(text) == READ


def test_a_call_in_other_tags_equals_itself_alone() -> None:
    call = "<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>"
    assert tool_calls(f"Well: {call}") == (ToolCall("", call),)
    assert tool_calls(call) != tool_calls(call.replace("Bonn", "Rome"))


@pytest.mark.parametrize(
    "text", ["", "Bonn is a city.", '{"city": "Bonn"}', "f(x) = {x}", '{"name": "Bonn"}', "[1, 2]"]
)
def test_prose_and_other_json_are_no_calls(text: str) -> None:
    assert tool_calls(text) == ()


def test_calls_keep_their_order_and_their_number() -> None:
    other = '{"name": "time", "arguments": {}}'
    assert [call.name for call in tool_calls(f"<tool_call>{other}</tool_call><tool_call>{CALL}</tool_call>")] == [
        "time",
        "weather",
    ]
    assert len(tool_calls(f"{CALL} {CALL}")) == 2


def test_a_call_that_cannot_be_read_is_one_and_equals_itself_alone() -> None:
    cut, other = '<tool_call>{"name": "weather", "argu', '<tool_call>{"name": "time", "argu'
    assert tool_calls(cut) == (ToolCall("", cut),)
    assert tool_calls(cut) != tool_calls(other)


@given(st.text(alphabet='{}[]"<>:,=/ namertoolcfunci1', max_size=200))
def test_no_text_makes_it_fail(text: str) -> None:
    tool_calls(text)


def test_deep_nesting_makes_it_no_call() -> None:
    assert tool_calls('{"a":' * 100_000) == ()
