"""Logged conversations of several formats as plain messages.

What the model reads of them becomes text, and what cannot is named.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dejakv.datasets.parts import (
    CALL,
    REASONING,
    RESULT,
    call_of,
    definition_of,
    definitions_of,
    joined,
    kind_of,
    noun_with_safe_name,
    parse_json_text,
    pieces_of,
    result_of,
    text_of,
)  # fmt: skip
from dejakv.errors import DatasetError

Role = Literal["system", "user", "assistant"]
_ROLES: Mapping[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "human": "user",
    "assistant": "assistant", "ai": "assistant", "gpt": "assistant", "model": "assistant",
    "bot": "assistant", "chatbot": "assistant", "tool": "user", "function": "user",
    "observation": "user",
}  # fmt: skip
_TOOLS = ("tool", "function", "observation")

CONVERSATIONS = (
    "messages",
    "traj",
    "history",
    "conversations",
    "contents",
    "chat_history",
    "input",
)
SYSTEM = (
    "system", "system_prompt", "systemPrompt", "system_instruction", "systemInstruction",
    "instructions", "instruction", "preamble",
)  # fmt: skip
DEFINITIONS = ("tools", "functions", "toolConfig", "tool_config")
QUESTIONS = ("question", "prompt", "message", "query")
SEEN = (*CONVERSATIONS, *SYSTEM, *DEFINITIONS, "documents", "trajectory")
"""Fields of a request that the model reads, beside a single question."""

NESTED = (
    "body", "request", "request_body", "requestBody", "proxy_server_request", "inputBodyJson",
    "payload", "params", "kwargs", "input", "inputs", "messages",
)  # fmt: skip
"""Fields in which a request's body may stand."""

_UNSEEN = (
    "suffix", "previous_response_id", "conversation", "cachedContent", "cached_content",
    "chat_template", "mcp_servers",
)  # fmt: skip
"""Fields that add to a prompt what is not in the log.

Some stand where the chat template of a model decides.
"""
_SCHEMAS = (
    "response_format",
    "text",
    "generationConfig",
    "output_format",
    "output_config",
    "format",
)
_SETTINGS = {
    "tool_choice", "metadata", "reasoning", "thinking", "stop", "logit_bias", "stream_options",
    "user", "model", "include", "options", "safetySettings", "inferenceConfig", "context",
    "partition", "id",
    # What stands beside a request in a log.
    "answer", "answers", "output", "outputs", "response", "responses", "completion", "choices",
    "expected", "reference", "label", "labels", "target", "usage", "recorded", "tags", "headers",
    "result", "image", "images",
}  # fmt: skip
_MIN_PROMPT_TEXT = 100
"""Characters of text from which on an unknown field may have been a part of the prompt."""


@dataclass(frozen=True)
class LoggedMessage:
    """One message as a model reads it.

    Attributes
    ----------
    role : Role
        Who says it.
    text : str
        Its text.
    tool : bool
        Whether it is a tool's result.
    edits : int or None
        Number (from 0) of the earlier message that it replaces, because the user changed that one.
    """

    role: Role
    text: str
    tool: bool = False
    edits: int | None = None


def read_messages(record: Mapping[str, Any], where: str) -> list[LoggedMessage]:
    """Return the messages of one logged conversation.

    Accepted are lists in the fields `CONVERSATIONS`, such as `messages` (OpenAI's form), `traj`
    (tau-bench), `history` (SWE-agent) and `conversations` (ShareGPT), and SWE-agent's `trajectory`.

    Parameters
    ----------
    record : mapping
        The conversation.
    where : str
        Its place, for error messages.

    Raises
    ------
    DatasetError
        For another form, an unknown role, an edit of a message that does not come before it, or a
        conversation without a model call.
    """
    messages = _read_conversation(record, where, set())
    before = 0
    for message in messages:
        if message.edits is None:
            before += 1
        elif not 0 <= message.edits < before:
            raise DatasetError(
                f"{where}: an edit names message {message.edits}, but {before} messages come"
                " before it"
            )

    if not any(message.role == "assistant" and message.edits is None for message in messages[1:]):
        raise DatasetError(
            f"{where} has no model call: give a conversation in which an assistant's message"
            " follows another one"
        )
    return messages


def read_request(
    record: Mapping[str, Any], where: str, left_out: set[str] | None = None
) -> tuple[LoggedMessage, ...]:
    """Return the messages of one logged request, which ends with a user's or a tool's message.

    If it has system texts or tools, these are the first message, with the role `system`.

    Parameters
    ----------
    record : mapping
        The request.
    where : str
        Its place, for error messages.
    left_out : set of str, optional
        Takes the names of what the model may have read and the messages lack.

    Raises
    ------
    DatasetError
        For another form, an unknown role, several prompts at once, and a conversation that ends
        with an answer.
    """
    messages = _read_conversation(
        record, where, set() if left_out is None else left_out, question=True
    )
    conversation = merged(message for message in messages if message.edits is None)

    # A reminder behind the conversation, or instructions alone.
    if conversation and conversation[-1].role == "system":
        conversation = merged((*conversation[:-1], LoggedMessage("user", conversation[-1].text)))
    if not conversation or conversation[-1].role != "user":
        raise DatasetError(
            f"{where}: a request must end with a user's or a tool's message: to replay"
            " conversations with answers, give --dataset sessions"
        )

    return conversation


def unnested(record: Mapping[str, Any], depth: int = 4) -> Mapping[str, Any]:
    """Return the body of a request, which may stand within other objects, also as JSON text.

    It is the record itself if it has no other.
    """
    # Nested JSON of a log may go on without end.
    if depth and not _has(record, CONVERSATIONS, "trajectory"):
        for name in NESTED:
            if isinstance(inner := parse_json_text(record.get(name)), dict):
                body = unnested(inner, depth - 1)
                if _has(body, CONVERSATIONS, "trajectory", "question", "prompt"):
                    # System texts and tools may stand beside the body; those within it win.
                    return {
                        **{key: record[key] for key in (*SYSTEM, *DEFINITIONS) if key in record},
                        **body,
                    }

    return record


def _has(record: Mapping[str, Any], names: Iterable[str], *more: str) -> bool:
    """Tell whether one of the fields is a text or a list with something in it."""
    return any(
        isinstance(each := parse_json_text(record.get(name)), str | list) and each
        for name in (*names, *more)
    )


def _beside(body: Mapping[str, Any], prompt: Any) -> bool:
    """Tell whether a prompt stands beside other messages, or names one that the provider keeps."""
    listed = [
        body.get(key)
        for key in CONVERSATIONS
        if key not in ("history", "chat_history") and body.get(key)
    ]
    return isinstance(prompt, dict) or (
        bool(listed) and isinstance(prompt, str) and prompt not in str(listed)
    )


def uncounted_fields(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a body's fields that the model may have read, and that are not counted."""
    for name, value in body.items():
        if (
            (name in _UNSEEN and value)
            or (name in ("prompt", "question") and _beside(body, value))
            or (
                name in _SCHEMAS
                and isinstance(value, dict)
                and "schema" in json.dumps(value).lower()
            )
            or (
                name not in (*SEEN, *QUESTIONS, *_SCHEMAS, *_SETTINGS, *NESTED)
                and _text_length(value) >= _MIN_PROMPT_TEXT
            )
        ):
            yield noun_with_safe_name("field", name)


def _text_length(value: Any) -> int:
    """Count the characters of the texts in a value; what has no space is a name or a digest."""
    if isinstance(value, str):
        return len(value) if " " in value else 0
    if isinstance(value, dict):
        return sum(map(_text_length, value.values()))
    return sum(map(_text_length, value)) if isinstance(value, list) else 0


def _read_conversation(
    record: Mapping[str, Any], where: str, left_out: set[str], *, question: bool = False
) -> list[LoggedMessage]:
    """Return system texts, tools and messages of a conversation.

    An edit names a message by its number, without edits, among all of them. With `question`, a
    question without messages is a conversation too.
    """
    record = unnested(record)
    texts = [record[name] for name in SYSTEM if isinstance(record.get(name), str | list | dict)]
    texts += (
        [[_fields(each) for each in listed]]
        if isinstance(listed := record.get("documents"), list)
        else []
    )
    heads = [text for each in texts if (text := text_of(each, left_out)).strip()]
    tools = [
        definition
        for name in DEFINITIONS
        for definition in definitions_of(parse_json_text(record.get(name)))
    ]

    items = [*_items(record, where, question)]
    if not items and not (question and heads):
        raise DatasetError(
            f"{where} has no conversation: give 'messages' (or traj, history, trajectory,"
            " conversations), a list of objects with 'role' and 'content'"
        )

    # `numbers` has for each item the number of its first message.
    conversation, numbers = list[LoggedMessage](), list[int]()
    for item, place in items:
        messages = list(_messages(item, place, tools, left_out))
        if messages and (edits := messages[0].edits) is not None:
            # An edit counts the log's items, and one item may have become several messages.
            in_range = 0 <= edits < len(numbers)
            conversation.append(
                LoggedMessage("user", messages[0].text, edits=numbers[edits] if in_range else edits)
            )
        else:
            numbers.append(sum(message.edits is None for message in conversation))
            conversation += messages

    begin = next(
        (place for place, message in enumerate(conversation) if message.role != "system"),
        len(conversation),
    )
    system_texts = {message.text for message in conversation[:begin]}

    # A log may have it twice: as a field and as the first message.
    first = [LoggedMessage("system", text) for text in heads if text not in system_texts]

    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    behind = [LoggedMessage("system", f"<tools>\n{listed}\n</tools>")] if tools else []

    # System texts and tools now stand before them, so the numbers in edits move.
    conversation = [
        (
            message
            if message.edits is None
            else replace(
                message, edits=message.edits + len(first) + len(behind) * (message.edits >= begin)
            )
        )
        for message in conversation
    ]

    return [*first, *conversation[:begin], *behind, *conversation[begin:]]


def _fields(document: Any) -> Any:
    """Return the texts of a document's fields, where all are texts."""
    whole = isinstance(document, dict) and all(isinstance(each, str) for each in document.values())
    return list(document.values()) if whole else document


def _items(record: Mapping[str, Any], where: str, question: bool) -> Iterator[tuple[Any, str]]:
    """Yield the messages of a conversation in the order in which the model reads them.

    Each comes with its place.
    """
    question_text = next(
        (
            record[name]
            for name in QUESTIONS
            if isinstance(record.get(name), str) and record[name].strip()
        ),
        None,
    )
    key = next((key for key in CONVERSATIONS if _has(record, (key,))), None)
    if key is not None and (question or not isinstance(record[key], str)):
        listed = parse_json_text(record[key])
        if isinstance(listed, list) and len(listed) == 1 and isinstance(listed[0], list):
            # A batch of one.
            listed = listed[0]
        if isinstance(listed, str):
            listed = [{"role": "user", "content": listed}]
        if all(isinstance(item, str | list) for item in listed):
            raise DatasetError(
                f"{where} asks for several prompts at once: write each on a line of its own"
            )

        yield from ((item, f"{where}, {key}[{number}]") for number, item in enumerate(listed))
        if question and key in ("history", "chat_history") and question_text is not None:
            yield {"role": "user", "content": question_text}, where
    elif isinstance(record.get("trajectory"), list):
        for step in record["trajectory"]:
            yield from ((message, where) for message in _step(step, where))
    elif question and question_text is not None:
        if text := text_of(record.get("context"), set()):
            yield {"role": "system", "content": text}, where
        yield {"role": "user", "content": question_text}, where


def _messages(
    item: Any, where: str, tools: list[Any], left_out: set[str]
) -> Iterator[LoggedMessage]:
    """Yield the messages of an item.

    Tools' results are messages of their own, and definitions of tools go into `tools`.
    """
    if isinstance(item, LoggedMessage):
        yield item
        return
    if not isinstance(item, dict):
        raise DatasetError(f"{where} is not a message: give an object with 'role' and 'content'")

    if "edit" in item:
        if not isinstance(item["edit"], int) or not isinstance(item.get("content"), str):
            raise DatasetError(
                f"{where}: give the number of an earlier message as 'edit', and its new text as"
                " 'content'"
            )
        yield LoggedMessage("user", item["content"], edits=item["edit"])
        return

    item = _unwrap_message(item)
    name = _role(item) or ("user" if "parts" in item else "")
    if name not in _ROLES:
        kind = kind_of(item)
        if not ("role" in item or "from" in item) and (CALL.search(kind) or RESULT.search(kind)):
            name, item = ("assistant" if CALL.search(kind) else "user"), {"content": [item]}
        elif kind and not ("role" in item or "from" in item or "content" in item):
            left_out.add(
                "reasoning"
                if REASONING.search(kind)
                else noun_with_safe_name("items of type", kind)
            )
            return
        else:
            raise DatasetError(
                f"{where} has the unknown role {name!r}: give one of {', '.join(_ROLES)}"
            )

    content = next(
        (
            item[key]
            for key in ("content", "parts", "value", "text", "message")
            if item.get(key) is not None
        ),
        None,
    )
    if content is not None and not isinstance(content, str | list | dict):
        raise DatasetError(
            f"{where}: 'content' is neither a text nor a list of parts: give one of them"
        )

    # A tool may give back any object, which is JSON to the model and no part of a message.
    if name in _TOOLS and isinstance(content, dict) and definition_of(content) is None:
        content = result_of(content, left_out)
    pieces = list(pieces_of(content, left_out))

    # Some logs have the same calls in the content and beside it.
    if not any(kind == "call" for kind, _ in pieces):
        pieces += [("call", call_of(call)) for call in _calls(item)]
    if not pieces and isinstance(item.get("refusal"), str):
        pieces = [("text", item["refusal"])]
    for key, omitted_name in (
        ("reasoning_content", "reasoning"),
        ("reasoning", "reasoning"),
        ("audio", "audio"),
        ("images", "pictures"),
    ):
        if item.get(key):
            left_out.add(omitted_name)

    if item.get("name") and name not in _TOOLS:
        left_out.add("names of speakers")

    # Some logs have the tools as messages: these join the request's own, and say nothing else.
    tools += [tool for kind, tool in pieces if kind == "tool"]
    if pieces and all(kind == "tool" for kind, _ in pieces):
        return

    texts = list[str]()
    results = False
    for kind, text in pieces:
        if kind == "result" and name not in _TOOLS:
            # Text before a result stays before it, as a message of its own.
            if any(texts):
                yield LoggedMessage(_ROLES[name], joined(texts))
            yield _tool(text)
            texts, results = [], True
        elif kind != "tool":
            texts.append(text)

    if name in _TOOLS:
        yield _tool(joined(texts))
    elif any(texts) or not results:
        yield LoggedMessage(_ROLES[name], joined(texts))


def _unwrap_message(item: dict[str, Any]) -> dict[str, Any]:
    """Return a message of LangChain's dumps, or within a wrapper, with its role and its content."""
    inner = next(
        (item[key] for key in ("kwargs", "data", "message") if isinstance(item.get(key), dict)),
        None,
    )
    if inner is None or "role" in item or "content" in item:
        return item
    named = item.get("id")
    kind = named[-1] if isinstance(named, list) and named else item.get("type", "")
    return (
        {"type": kind, **inner} if "lc" in item else {**inner, **({"type": kind} if kind else {})}
    )


def _role(item: Mapping[str, Any]) -> str:
    """Return who says it, as the log has it, in small letters: `AIMessage` is `ai`."""
    author = item.get("author")
    role = item.get(
        "role",
        item.get("from", author.get("role") if isinstance(author, dict) else item.get("type", "")),
    )
    return re.sub(r"message(chunk)?$", "", str(role).lower()) or str(role).lower()


def _calls(item: Mapping[str, Any]) -> list[Any]:
    """Return the tool calls beside a message's content."""
    more = item.get("additional_kwargs")
    calls = (
        item.get("tool_calls")
        or item.get("toolCalls")
        or (more.get("tool_calls") if isinstance(more, dict) else None)
    )
    calls = calls or ([item["function_call"]] if item.get("function_call") else [])
    return calls if isinstance(calls, list) else [calls]


def _tool(text: str) -> LoggedMessage:
    return LoggedMessage("user", f"<tool_response>\n{text}\n</tool_response>", tool=True)


def _step(step: Any, where: str) -> Iterator[LoggedMessage]:
    """Yield the messages of a step of SWE-agent's `trajectory`.

    They are the response or action, then the observation.
    """
    if not isinstance(step, dict):
        raise DatasetError(
            f"{where}: a step of 'trajectory' is not an object: give steps as SWE-agent writes them"
        )

    response, action = (str(step.get(key) or "") for key in ("response", "action"))
    response = response or str(step.get("thought") or "")

    # A response usually has the action in it, which is not said twice.
    parts = (response,) if response and action in response else (response, action)
    yield LoggedMessage("assistant", "\n".join(part for part in parts if part))
    yield _tool(str(step.get("observation") or ""))


def merged(messages: Iterable[LoggedMessage]) -> tuple[LoggedMessage, ...]:
    """Return the same conversation as strict templates require it.

    Adjacent messages of the same role are joined, and empty ones are left out.
    """
    out: list[LoggedMessage] = []
    for message in messages:
        if not message.text.strip():
            continue
        if out and out[-1].role == message.role:
            between = (
                "\n"
                if message.role == "assistant" and message.text.startswith("<tool_call>")
                else "\n\n"
            )
            out[-1] = LoggedMessage(message.role, f"{out[-1].text}{between}{message.text}")
        else:
            out.append(message)

    return tuple(out)
