"""What a wrong answer is: how an approximate answer must not differ from full computation's. Both are greedy, whatever the request samples
with: two samples of one distribution differ without anybody's fault."""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import ConfigError, InputError
from dejakv.request import Request
from dejakv.settings import named, shown

_MARKS = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|<function=")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Seen:
    """One of the two answers.

    continued  log probabilities `[tokens, vocabulary]` of given tokens after the prompt; None if the engine has none
    """

    text: str
    token_ids: tuple[int, ...]
    continued: Callable[[Sequence[int]], NDArray[np.float32] | None] = lambda _: None


@dataclass(frozen=True)
class Differs:
    """Compares a full and a reused answer to one request. What `wrong` raises counts as wrong.

    wrong   `(request, full, reused)`: whether the reused answer is wrong
    tokens  length of the answers to compare; None: what the request asks for
    logits  whether `Seen.continued` is read, so that an answer known as text will not do
    """

    wrong: Callable[[Request, Seen, Seen], bool]
    tokens: int | None = None
    logits: bool = False


NAMED = {
    "first": Differs(lambda _, full, reused: full.token_ids[:1] != reused.token_ids[:1], tokens=1),
    "answer": Differs(lambda _, full, reused: full.text != reused.text),
    "tool": Differs(lambda _, full, reused: tool_calls(full.text) != tool_calls(reused.text)),
}
"""Another first token; another text; other tool calls, or prose in place of calls. The order of an argument's keys does not matter, and
neither does prose beside calls."""


def differs_of(text: str) -> Differs:
    """What a setting `differs` names. Raises: ConfigError for an unknown name, and for a function that does not import.

    >>> asked, full, reused = Request("r", "Where?", "Where?"), Seen("In Rome.", (7, 8)), Seen("In Oslo.", (7, 9))
    >>> [differs_of(name).wrong(asked, full, reused) for name in ("first", "answer", "tool")]
    [False, True, False]
    """
    if text in NAMED:
        return NAMED[text]
    kind, colon, value = text.partition(":")
    if kind == "kl" and colon:
        return _distribution(_nats(text, value))
    if colon and kind and value:
        judge = named(text, "--differs")
        return Differs(lambda request, full, reused: bool(judge(request, full.text, reused.text)))
    raise ConfigError(
        f"--differs {shown(text)} is unknown: give {', '.join(NAMED)}, kl:NATS (such as kl:0.05) or package.module:function"
    )


def _nats(text: str, value: str) -> float:
    try:
        nats = float(value)
    except ValueError:
        nats = math.nan
    if not 0 < nats < math.inf:
        raise ConfigError(f"--differs {shown(text)}: give a divergence above 0 in nats, such as kl:0.05")
    return nats


def _distribution(most: float) -> Differs:
    """The first token's distribution diverges from full computation's by more than `most` nats."""

    def wrong(_request: Request, full: Seen, reused: Seen) -> bool:
        given = full.token_ids[:1] or (0,)  # any token: its distribution is the prompt's
        wanted, got = full.continued(given), reused.continued(given)
        if wanted is None or got is None:
            raise InputError(
                "the engine gives no log probabilities of this prompt: choose another way to differ than kl, or another engine"
            )
        return not float(divergence(wanted[:1], got[:1])[0]) <= most  # what is no number is wrong

    return Differs(wrong, tokens=1, logits=True)


def divergence(wanted: NDArray[np.float32], got: NDArray[np.float32]) -> NDArray[np.float64]:
    """Kullback-Leibler divergence of `got` from `wanted` at each token, `[tokens]`, in nats, from two arrays
    `[tokens, vocabulary]` of log probabilities."""
    return np.maximum(0.0, np.sum(np.exp(wanted) * (wanted - got), axis=-1, dtype=np.float64))


class ToolCall(NamedTuple):
    """A tool's name and its arguments as JSON with sorted keys. A call that cannot be read has no name, and its text."""

    name: str
    arguments: str


def tool_calls(text: str) -> tuple[ToolCall, ...]:
    """The calls of an answer in their order; empty for prose. Never raises.

    Calls are JSON objects that name a tool and its arguments: alone, in a list or a `tool_calls` object, in a code fence, behind
    `[TOOL_CALLS]` or `<|python_tag|>`, or between `<tool_call>` tags. Other calls (`<function=NAME>`) are compared as they are written.

    >>> tool_calls('Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>')
    (ToolCall(name='weather', arguments='{"city": "Bonn"}'),)
    """
    calls = [call for value in _values(text) for call in _calls_in(value)]
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
