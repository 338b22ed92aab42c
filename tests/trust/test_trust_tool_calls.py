"""Tool calls in the forms that models write them in."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejakv.trust.tool_calls import ToolCall, tool_calls

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
        '<function=weather>{"city": "Bonn", "days": 2}</function>',
        json.dumps({"tool_calls": [{"type": "function", "function": json.loads(CALL)}]}),
        '{"name": "weather", "arguments": "{\\"days\\": 2, \\"city\\": \\"Bonn\\"}"}',
    ],
)
def test_one_call_in_many_spellings(text: str) -> None:
    assert tool_calls(text) == READ


def test_parameters_in_tags_are_texts() -> None:
    text = "<tool_call><function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function></tool_call>"
    assert tool_calls(text) == (ToolCall("weather", '{"city": "Bonn"}'),)


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
