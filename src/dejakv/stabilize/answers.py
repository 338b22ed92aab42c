"""What an answer says, to compare those to two forms of a request."""

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any


def answer_of(raw: bytes) -> Any:
    """Return the texts and calls of tools of an answer, without ids and times.

    Parameters
    ----------
    raw : bytes
        Body of an answer of OpenAI's chat completions or Anthropic's messages, whole or streamed.

    Returns
    -------
    Any
        Something that equals that of another answer with the same content; None for an error and
        for what is no answer.
    """
    try:
        if raw.lstrip()[:1] == b"{":
            return _whole(json.loads(raw))
        return _streamed(raw) or None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _whole(payload: Any) -> Any:
    if isinstance(payload.get("content"), list):
        return [_block(block) for block in payload["content"]]
    choices = payload["choices"]
    return {choice["index"]: _message(choice["message"]) for choice in choices} or None


def _message(message: Any) -> tuple[str, list[tuple[str, Any]]]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return (
        message.get("content") or "",
        [(call["name"], _arguments(call["arguments"])) for call in calls],
    )


def _block(block: Any) -> tuple[str, Any]:
    if block["type"] == "tool_use":
        return block["name"], block["input"]
    return block["type"], block.get("text")


def _arguments(text: str) -> Any:
    """Read a call's arguments, whose spaces tell nothing."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _streamed(raw: bytes) -> dict[int, Any]:
    texts: defaultdict[int, str] = defaultdict(str)
    names: dict[tuple[int, int], str] = {}
    arguments: defaultdict[tuple[int, int], str] = defaultdict(str)
    for event in _events(raw):
        if event.get("type") == "content_block_start":
            names[event["index"], 0] = event["content_block"].get("name", "")
        elif event.get("type") == "content_block_delta":
            texts[event["index"]] += event["delta"].get("text", "")
            arguments[event["index"], 0] += event["delta"].get("partial_json", "")
        elif event.get("error"):
            return {}
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            texts[choice["index"]] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                place, function = (choice["index"], call["index"]), call["function"]
                names[place] = names.get(place, "") + (function.get("name") or "")
                arguments[place] += function.get("arguments") or ""

    said: dict[int, Any] = {**texts}
    for place, name in names.items():
        calls = (said.get(place[0], ""), place[1], name, _arguments(arguments[place]))
        said[place[0]] = calls
    return said


def _events(raw: bytes) -> Iterator[Any]:
    for line in raw.splitlines():
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)
