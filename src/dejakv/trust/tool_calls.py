"""The tool calls in an answer, whatever form a model writes them in.

Found are JSON objects that name a tool and its arguments: alone, in a list or a `tool_calls` object, in a code fence, behind
`[TOOL_CALLS]` or `<|python_tag|>`, between `<tool_call>` tags; and `<function=NAME>` with JSON or `<parameter=KEY>` tags.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

_MARKS = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|<function=")
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
_DECODER = json.JSONDecoder()


class ToolCall(NamedTuple):
    """A tool's name and its arguments as JSON with sorted keys. A call that cannot be read has no name, and its text."""

    name: str
    arguments: str


def tool_calls(text: str) -> tuple[ToolCall, ...]:
    """The calls of an answer in their order; empty for prose. Never raises."""
    calls = [ToolCall(match[1], _tagged(match[2])) for match in _FUNCTION.finditer(text)]
    rest = _FUNCTION.sub("", text)
    calls += [call for value in _values(rest) for call in _calls_in(value)]
    if not calls and (mark := _MARKS.search(text)) is not None:
        return (ToolCall("", text[mark.start() :].strip()),)
    return tuple(calls)


def _values(text: str) -> Iterator[Any]:
    """The JSON objects in a text, the outermost ones."""
    at = text.find("{")
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            yield value
        at = text.find("{", end)


def _calls_in(value: Any) -> Iterator[ToolCall]:
    if isinstance(value, list):
        for item in cast(list[Any], value):
            yield from _calls_in(item)
    elif isinstance(value, dict):
        found = cast(dict[str, Any], value)
        name, given = found.get("name"), found.get("arguments", found.get("parameters"))
        if isinstance(name, str) and given is not None:
            yield ToolCall(name, _arguments(given))
            return
        for item in found.values():
            yield from _calls_in(item)


def _arguments(given: Any) -> str:
    """In one spelling. OpenAI's form has them as JSON in a string."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return given.strip()
    return json.dumps(given, sort_keys=True)


def _tagged(inside: str) -> str:
    found = {name: value.strip() for name, value in _PARAMETER.findall(inside)}
    return json.dumps(found, sort_keys=True) if found else _arguments(inside)
