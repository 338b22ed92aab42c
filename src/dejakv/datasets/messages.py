"""Logged conversations of several formats as plain messages: tool calls and tool results become text."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dejakv.errors import DatasetError

Role = Literal["system", "user", "assistant"]
_ROLES: Mapping[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant", "ai": "assistant",
    "gpt": "assistant", "model": "assistant", "tool": "user", "function": "user", "observation": "user",
}  # fmt: skip
_TOOLS = ("tool", "function", "observation")


@dataclass(frozen=True)
class Message:
    """One message as a model reads it. `tool`: it is a tool's result. `edits`: the number (from 0) of the earlier message that
    it replaces, because the user changed it."""

    role: Role
    text: str
    tool: bool = False
    edits: int | None = None


def read_messages(record: Mapping[str, Any], where: str) -> list[Message]:
    """The messages of one logged conversation. `where` is its place, for error messages.

    Accepted are `messages` (OpenAI's form), `traj` (tau-bench), `history` or `trajectory` (SWE-agent), `conversations`
    (ShareGPT). Raises: DatasetError for another form, an unknown role, or a conversation without a model call.
    """
    found = _found(record, where)
    before = 0
    for message in found:
        if message.edits is None:
            before += 1
        elif not 0 <= message.edits < before:
            raise DatasetError(f"{where}: an edit names message {message.edits}, but {before} messages come before it")
    if not any(message.role == "assistant" and message.edits is None for message in found[1:]):
        raise DatasetError(
            f"{where} has no model call: give a conversation in which an assistant's message follows another one"
        )
    return found


def read_request(record: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    """The messages of one logged request, which ends with a user's or a tool's message. Raises: DatasetError."""
    found = _found(record, where)
    kept = merged(message for message in found if message.edits is None)
    if not kept or kept[-1].role != "user":
        raise DatasetError(
            f"{where}: a request must end with a user's or a tool's message: to replay conversations with answers, give --dataset sessions"
        )
    return kept


def _found(record: Mapping[str, Any], where: str) -> list[Message]:
    for key in ("messages", "traj", "history", "conversations"):
        if isinstance(record.get(key), list) and record[key]:
            return [_message(item, f"{where}, {key}[{number}]") for number, item in enumerate(record[key])]
    if not isinstance(record.get("trajectory"), list):
        raise DatasetError(
            f"{where} has no conversation: give 'messages' (or traj, history, trajectory, conversations), a list of "
            "objects with 'role' and 'content'"
        )
    return [message for step in record["trajectory"] for message in _step(step, where)]


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise DatasetError(f"{where} is not a message: give an object with 'role' and 'content'")
    if "edit" in item:
        if not isinstance(item["edit"], int) or not isinstance(item.get("content"), str):
            raise DatasetError(
                f"{where}: give the number of an earlier message as 'edit', and its new text as 'content'"
            )
        return Message("user", item["content"], edits=item["edit"])
    name = str(item.get("role", item.get("from", "")))
    if name not in _ROLES:
        raise DatasetError(f"{where} has the unknown role {name!r}: give one of {', '.join(_ROLES)}")
    text = _text(item.get("content", item.get("value")), where)
    calls = item.get("tool_calls") or ([item["function_call"]] if item.get("function_call") else [])
    parts = [text, *(_call(call) for call in calls)]
    joined = "\n".join(part for part in parts if part)
    return _tool(joined) if name in _TOOLS else Message(_ROLES[name], joined)


def _tool(text: str) -> Message:
    return Message("user", f"<tool_response>\n{text}\n</tool_response>", tool=True)


def _text(content: Any, where: str) -> str:
    """Text of a message's content: a string, the text parts of a list, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    raise DatasetError(f"{where}: 'content' is neither a text nor a list of parts: give one of them")


def _call(call: Any) -> str:
    """A tool call in the form of Hermes' and Qwen's templates."""
    function = call.get("function", call) if isinstance(call, dict) else {"name": str(call)}
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {"text": arguments}
    content = json.dumps({"name": function.get("name", ""), "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{content}\n</tool_call>"


def _step(step: Any, where: str) -> Iterator[Message]:
    """Yield the messages of a step of SWE-agent's `trajectory`: the response or action, then the observation."""
    if not isinstance(step, dict):
        raise DatasetError(f"{where}: a step of 'trajectory' is not an object: give steps as SWE-agent writes them")
    said = step.get("response") or step.get("thought") or ""
    action = step.get("action") or ""
    parts = (said,) if said and action in said else (said, action)
    yield Message("assistant", "\n".join(str(part) for part in parts if part))
    yield _tool(step.get("observation") or "")


def merged(messages: Iterable[Message]) -> tuple[Message, ...]:
    """The same conversation with adjacent messages of the same role joined and empty ones left out, as strict templates require."""
    out: list[Message] = []
    for message in messages:
        if not message.text.strip():
            continue
        if out and out[-1].role == message.role:
            out[-1] = Message(message.role, f"{out[-1].text}\n\n{message.text}")
        else:
            out.append(message)
    return tuple(out)
