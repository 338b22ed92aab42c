"""Tell a finished answer from one that must not be kept: cut off, filtered, refused, a call."""

from collections.abc import Mapping
from typing import Any, cast

FINISHED = frozenset(("stop", "end_turn", "stop_sequence", "eos", "eos_token", "complete"))
"""Reasons of a normal end, in lower case, as OpenAI, Anthropic, Google, Cohere and Ollama write
them. Every other reason (`length`, `content_filter`, `tool_calls`, `refusal`, ...) is none.
"""

_CALLS = ("tool_calls", "invalid_tool_calls", "function_call", "refusal")


def is_finished(reason: object) -> bool:
    """Return whether a finish reason is that of a normal end.

    Examples
    --------
    >>> is_finished("STOP"), is_finished("length"), is_finished(None)
    (True, False, False)
    """
    return isinstance(reason, str) and reason.lower() in FINISHED


def plain_text(message: Mapping[str, Any]) -> str:
    """Return the text of an OpenAI message.

    It is empty for a tool call, a refusal, a content in parts, and white space alone.
    """
    content: object = message.get("content")
    if any(message.get(name) for name in _CALLS) or not isinstance(content, str):
        return ""
    return content.strip() and content


def finished_text(response: object) -> str | None:
    """Return the text of a chat completion or completion in OpenAI's form, if it may be kept.

    Parameters
    ----------
    response : object
        A dictionary, or an object with `model_dump`, such as those of the package `openai`.

    Returns
    -------
    str or None
        Text of the first choice. None for an error, and unless every choice has text and came to
        a normal end: an answer that was cut off or filtered, a refusal and a tool call are no
        answers to the next one who asks.

    Examples
    --------
    >>> message = {"role": "assistant", "content": "On the mat."}
    >>> finished_text({"choices": [{"message": message, "finish_reason": "stop"}]})
    'On the mat.'
    >>> finished_text({"choices": [{"message": message, "finish_reason": "length"}]}) is None
    True
    """
    dump = getattr(response, "model_dump", None)
    body: object = dump() if callable(dump) else response
    if not isinstance(body, Mapping):
        return None
    fields = cast(Mapping[str, Any], body)
    choices: object = fields.get("choices")
    if fields.get("error") or not isinstance(choices, list) or not choices:
        return None

    texts: list[str] = []
    for choice in cast(list[Any], choices):
        if not isinstance(choice, Mapping):
            return None
        parts = cast(Mapping[str, Any], choice)
        message: object = parts.get("message") or {"content": parts.get("text")}
        if not isinstance(message, Mapping) or not is_finished(parts.get("finish_reason")):
            return None
        texts.append(plain_text(cast(Mapping[str, Any], message)))
    return texts[0] if all(texts) else None
