"""Logged conversations of several formats as plain messages: what the model reads of them becomes text, and what cannot is named."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dejakv.errors import DatasetError

Role = Literal["system", "user", "assistant"]
_ROLES: Mapping[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant", "ai": "assistant",
    "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatbot": "assistant", "tool": "user", "function": "user",
    "observation": "user",
}  # fmt: skip
_TOOLS = ("tool", "function", "observation")

CONVERSATIONS = ("messages", "traj", "history", "conversations", "contents", "chat_history", "input")
SYSTEM = (
    "system", "system_prompt", "systemPrompt", "system_instruction", "systemInstruction", "instructions", "instruction", "preamble",
)  # fmt: skip
DEFINITIONS = ("tools", "functions", "toolConfig", "tool_config")
QUESTIONS = ("question", "prompt", "message", "query")
SEEN = (*CONVERSATIONS, *SYSTEM, *DEFINITIONS, "documents", "trajectory")
"""Fields of a request that the model reads, beside a single question."""

NESTED = (
    "body", "request", "request_body", "requestBody", "proxy_server_request", "inputBodyJson", "payload", "kwargs", "input", "inputs",
    "messages",
)  # fmt: skip
"""Fields in which a request's body may stand."""

_UNSEEN = (
    "suffix",
    "previous_response_id",
    "conversation",
    "cachedContent",
    "cached_content",
    "chat_template",
    "mcp_servers",
)
"""Fields that add to a prompt what is not in the log, or stands where the chat template of a model decides."""
_SCHEMAS = ("response_format", "text", "generationConfig", "output_format", "output_config", "format")
_SETTINGS = {
    "tool_choice", "metadata", "reasoning", "thinking", "stop", "logit_bias", "stream_options", "user", "model", "include", "options",
    "safetySettings", "inferenceConfig", "context", "partition", "id",
    # what stands beside a request in a log
    "answer", "answers", "output", "outputs", "response", "responses", "completion", "choices", "expected", "reference", "label", "labels",
    "target", "usage", "recorded", "tags", "headers", "result", "image", "images",
}  # fmt: skip
_LEAST = 100
"""Characters of text from which on an unknown field may have been a part of the prompt."""

_CALL = re.compile(r"(tool_use|tool_calls?|_call)$|^function$")
_RESULT = re.compile(r"(tool|call|function)\w*(result|response|output)$")
_REASONING = re.compile(r"thinking|reasoning")
_MEDIA = re.compile(r"image|audio|video|file|media|inline_?data|base64|^url$")
_CALLS = ("functionCall", "function_call", "toolUse", "toolCall", "tool_call")
_RESULTS = ("functionResponse", "function_response", "toolResult", "tool_result")
_TEXTS = (
    "text",
    "content",
    "parts",
    "value",
    "message",
    "data",
    "output",
    "result",
    "response",
    "error",
    "source",
    "refusal",
)
_ARGUMENTS = ("arguments", "input", "args", "action", "code")
_SCHEMA = ("parameters", "input_schema", "inputSchema", "parametersJsonSchema")


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
    found = _found(record, where, set())
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


def read_request(record: Mapping[str, Any], where: str, left_out: set[str] | None = None) -> tuple[Message, ...]:
    """The messages of one logged request, which ends with a user's or a tool's message. The first one has its system texts and tools.

    left_out  takes the names of what the model may have read and the messages lack

    Raises: DatasetError.
    """
    found = _found(record, where, set() if left_out is None else left_out, question=True)
    kept = merged(message for message in found if message.edits is None)
    if kept and kept[-1].role == "system":  # a reminder behind the conversation, or instructions alone
        kept = merged((*kept[:-1], Message("user", kept[-1].text)))
    if not kept or kept[-1].role != "user":
        raise DatasetError(
            f"{where}: a request must end with a user's or a tool's message: to replay conversations with answers, give --dataset sessions"
        )
    return kept


def parsed(value: Any) -> Any:
    """A value that may be JSON in a string."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{", '"'):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return parsed(inner) if isinstance(inner, str) else inner
    return value


def unnested(record: Mapping[str, Any], depth: int = 4) -> Mapping[str, Any]:
    """The body of a request, which may stand within other objects, also as JSON text; the record itself if it has no other."""
    if depth and not _has(record, CONVERSATIONS, "trajectory"):
        for name in NESTED:
            if isinstance(inner := parsed(record.get(name)), dict):
                body = unnested(inner, depth - 1)
                if _has(body, CONVERSATIONS, "trajectory", "question", "prompt"):
                    return {**{key: record[key] for key in (*SYSTEM, *DEFINITIONS) if key in record}, **body}
    return record


def _has(record: Mapping[str, Any], names: Iterable[str], *more: str) -> bool:
    """Whether one of the fields is a text or a list with something in it."""
    return any(isinstance(each := parsed(record.get(name)), str | list) and each for name in (*names, *more))


def unseen(body: Mapping[str, Any]) -> Iterator[str]:
    """Names of a body's fields that the model may have read, and that are not counted."""
    for name, value in body.items():
        if (
            (name in _UNSEEN and value)
            or (name in _SCHEMAS and isinstance(value, dict) and "schema" in json.dumps(value).lower())
            or (name not in (*SEEN, *QUESTIONS, *_SCHEMAS, *_SETTINGS, *NESTED) and _words(value) >= _LEAST)
        ):
            yield _named("field", name)


def _words(value: Any) -> int:
    """Characters of the texts in a value; what has no space is a name or a digest."""
    if isinstance(value, str):
        return len(value) if " " in value else 0
    if isinstance(value, dict):
        return sum(map(_words, value.values()))
    return sum(map(_words, value)) if isinstance(value, list) else 0


def _named(what: str, name: str) -> str:
    """A name of the log's, if it is one and no text."""
    return f"{what} {name!r}" if re.fullmatch(r"[\w.:/-]{1,40}", name) else f"{what} with another name"


def _found(record: Mapping[str, Any], where: str, left_out: set[str], *, question: bool = False) -> list[Message]:
    """System texts, tools and messages of a conversation. An edit names a message by its number, without edits, among all of them.

    question  whether a question without messages is a conversation
    """
    record = unnested(record)
    texts = [record[name] for name in (*SYSTEM, "documents") if isinstance(record.get(name), str | list | dict)]
    heads = [text for each in texts if (text := text_of(each, left_out)).strip()]
    tools = [one for name in DEFINITIONS for one in _definitions(parsed(record.get(name)))]
    items = [*_items(record, where, question)]
    if not items and not (question and heads):
        raise DatasetError(
            f"{where} has no conversation: give 'messages' (or traj, history, trajectory, conversations), a list of "
            "objects with 'role' and 'content'"
        )

    found, numbers = list[Message](), list[int]()  # of an item, that of its first message
    for item, place in items:
        messages = list(_messages(item, place, tools, left_out))
        if messages and (edits := messages[0].edits) is not None:
            known = 0 <= edits < len(numbers)
            found.append(Message("user", messages[0].text, edits=numbers[edits] if known else edits))
        else:
            numbers.append(sum(message.edits is None for message in found))
            found += messages

    begin = next((place for place, message in enumerate(found) if message.role != "system"), len(found))
    said = {message.text for message in found[:begin]}
    first = [Message("system", text) for text in heads if text not in said]
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    behind = [Message("system", f"<tools>\n{listed}\n</tools>")] if tools else []
    found = [
        message
        if message.edits is None
        else replace(message, edits=message.edits + len(first) + len(behind) * (message.edits >= begin))
        for message in found
    ]
    return [*first, *found[:begin], *behind, *found[begin:]]


def _items(record: Mapping[str, Any], where: str, question: bool) -> Iterator[tuple[Any, str]]:
    """The messages of a conversation in the order in which the model reads them, each with its place."""
    asked = next(
        (record[name] for name in QUESTIONS if isinstance(record.get(name), str) and record[name].strip()), None
    )
    key = next((key for key in CONVERSATIONS if _has(record, (key,))), None)
    if key is not None and (question or not isinstance(record[key], str)):
        listed = parsed(record[key])
        if isinstance(listed, list) and len(listed) == 1 and isinstance(listed[0], list):
            listed = listed[0]  # a batch of one
        if isinstance(listed, str):
            listed = [{"role": "user", "content": listed}]
        if all(isinstance(item, str | list) for item in listed):
            raise DatasetError(f"{where} asks for several prompts at once: write each on a line of its own")
        yield from ((item, f"{where}, {key}[{number}]") for number, item in enumerate(listed))
        if question and key in ("history", "chat_history") and asked is not None:
            yield {"role": "user", "content": asked}, where
    elif isinstance(record.get("trajectory"), list):
        for step in record["trajectory"]:
            yield from ((message, where) for message in _step(step, where))
    elif question and asked is not None:
        if text := text_of(record.get("context"), set()):
            yield {"role": "system", "content": text}, where
        yield {"role": "user", "content": asked}, where


def _messages(item: Any, where: str, tools: list[Any], left_out: set[str]) -> Iterator[Message]:
    """The messages of an item: tools' results are messages of their own, definitions of tools go into `tools`."""
    if isinstance(item, Message):
        yield item
        return
    if not isinstance(item, dict):
        raise DatasetError(f"{where} is not a message: give an object with 'role' and 'content'")
    if "edit" in item:
        if not isinstance(item["edit"], int) or not isinstance(item.get("content"), str):
            raise DatasetError(
                f"{where}: give the number of an earlier message as 'edit', and its new text as 'content'"
            )
        yield Message("user", item["content"], edits=item["edit"])
        return
    item = _flat(item)
    name = _role(item)
    if name not in _ROLES:
        kind = _kind(item)
        if not ("role" in item or "from" in item) and (_CALL.search(kind) or _RESULT.search(kind)):
            name, item = ("assistant" if _CALL.search(kind) else "user"), {"content": [item]}
        elif kind and not ("role" in item or "from" in item or "content" in item):
            left_out.add("reasoning" if _REASONING.search(kind) else _named("items of type", kind))
            return
        else:
            raise DatasetError(f"{where} has the unknown role {name!r}: give one of {', '.join(_ROLES)}")

    content = next(
        (item[key] for key in ("content", "parts", "value", "text", "message") if item.get(key) is not None), None
    )
    if content is not None and not isinstance(content, str | list | dict):
        raise DatasetError(f"{where}: 'content' is neither a text nor a list of parts: give one of them")
    if name in _TOOLS and isinstance(content, dict) and _definition(content) is None:
        content = _result(content, left_out)
    pieces = list(_pieces(content, left_out))
    if not any(kind == "call" for kind, _ in pieces):
        pieces += [("call", _call(call)) for call in _calls(item)]
    if not pieces and isinstance(item.get("refusal"), str):
        pieces = [("text", item["refusal"])]
    for key, what in (
        ("reasoning_content", "reasoning"),
        ("reasoning", "reasoning"),
        ("audio", "audio"),
        ("images", "pictures"),
    ):
        if item.get(key):
            left_out.add(what)
    if item.get("name") and name not in _TOOLS:
        left_out.add("names of speakers")

    tools += [tool for kind, tool in pieces if kind == "tool"]
    if pieces and all(kind == "tool" for kind, _ in pieces):
        return
    texts = list[str]()
    results = False
    for kind, text in pieces:
        if kind == "result" and name not in _TOOLS:
            if any(texts):
                yield Message(_ROLES[name], _lines(texts))
            yield _tool(text)
            texts, results = [], True
        elif kind != "tool":
            texts.append(text)
    if name in _TOOLS:
        yield _tool(_lines(texts))
    elif any(texts) or not results:
        yield Message(_ROLES[name], _lines(texts))


def _lines(texts: Iterable[str]) -> str:
    return "\n".join(text for text in texts if text)


def _flat(item: dict[str, Any]) -> dict[str, Any]:
    """A message of LangChain's dumps, or within a wrapper, as an object with its role and its content."""
    inner = next((item[key] for key in ("kwargs", "data", "message") if isinstance(item.get(key), dict)), None)
    if inner is None or "role" in item or "content" in item:
        return item
    named = item.get("id")
    kind = named[-1] if isinstance(named, list) and named else item.get("type", "")
    return {"type": kind, **inner} if "lc" in item else {**inner, **({"type": kind} if kind else {})}


def _role(item: Mapping[str, Any]) -> str:
    """The name of who says it, as it stands in the log, in small letters: `AIMessage` is `ai`."""
    author = item.get("author")
    said = item.get("role", item.get("from", author.get("role") if isinstance(author, dict) else item.get("type", "")))
    return re.sub(r"message(chunk)?$", "", str(said).lower()) or str(said).lower()


def _kind(part: Mapping[str, Any]) -> str:
    return str(part.get("type") or "").lower().replace("-", "_")


def _calls(item: Mapping[str, Any]) -> list[Any]:
    """The tool calls beside a message's content."""
    more = item.get("additional_kwargs")
    calls = (
        item.get("tool_calls") or item.get("toolCalls") or (more.get("tool_calls") if isinstance(more, dict) else None)
    )
    calls = calls or ([item["function_call"]] if item.get("function_call") else [])
    return calls if isinstance(calls, list) else [calls]


def _tool(text: str) -> Message:
    return Message("user", f"<tool_response>\n{text}\n</tool_response>", tool=True)


def text_of(content: Any, left_out: set[str]) -> str:
    """The text of a value: a string, parts, or nothing."""
    return _lines(text for kind, text in _pieces(content, left_out) if kind != "tool")


def _pieces(part: Any, left_out: set[str]) -> Iterator[tuple[str, Any]]:
    """The parts of a content in any format: `text`, `call`, `result`, each with its text, or `tool` with a definition. What is no text goes
    into `left_out` by its type."""
    if part is None:
        return
    if isinstance(part, str):
        yield "text", part
    elif isinstance(part, list):
        for each in part:
            yield from _pieces(each, left_out)
    elif not isinstance(part, dict):
        yield "text", json.dumps(part)
    else:
        yield from _part(part, left_out)


def _part(part: dict[str, Any], left_out: set[str]) -> Iterator[tuple[str, Any]]:
    kind = _kind(part)
    call = next((part[key] for key in _CALLS if isinstance(part.get(key), dict)), None)
    result = next((part[key] for key in _RESULTS if isinstance(part.get(key), dict)), None)
    if (tool := _definition(part)) is not None:
        yield "tool", tool
    elif call is not None or _CALL.search(kind):
        yield "call", _call(part if call is None else call)
    elif result is not None or _RESULT.search(kind):
        yield "result", _result(part if result is None else result, left_out)
    elif _REASONING.search(kind) or "reasoningContent" in part or "thought" in part:
        left_out.add("reasoning")
    elif kind in ("document", "search_result") and (texts := _quoted(part)):
        yield "text", texts
    elif _MEDIA.search(kind) or kind == "document":
        left_out.add(_named("parts of type", kind))
    else:
        key = next((key for key in _TEXTS if part.get(key) not in (None, "", [])), None)
        if key is None or (key == "source" and not isinstance(part[key], dict | list)):
            other = kind or next((key for key in part if isinstance(part[key], dict | list | str)), "")
            left_out.update([_named("parts of type", other)] if part and not any(key in part for key in _TEXTS) else [])
        else:
            yield from _pieces(part[key], left_out)


def _quoted(part: Mapping[str, Any]) -> str:
    """The text of a document in a message, with its title; empty if it is none."""
    source = part.get("source")
    if isinstance(source, dict) and _MEDIA.search(_kind(source)):
        return ""
    text = text_of(part.get("content") or source, set())
    return _lines([str(part.get("title") or ""), str(part.get("context") or ""), text]) if text else ""


def _result(value: Any, left_out: set[str]) -> str:
    """What a tool gave back, as text: parts by their text, other objects as JSON."""
    if isinstance(value, dict):
        inner = [
            value[key]
            for key in ("content", "output", "result", "response", "text", "error", "json")
            if value.get(key) is not None
        ]
        if inner:
            return _result(inner[0], left_out)
        return json.dumps({key: each for key, each in value.items() if key != "type"}, ensure_ascii=False)
    if isinstance(value, list) and all(
        isinstance(each, str) or (isinstance(each, dict) and _is_part(each)) for each in value
    ):
        return text_of(value, left_out)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _is_part(part: Mapping[str, Any]) -> bool:
    return "type" in part or len(part) == 1


def _definition(part: Any) -> dict[str, Any] | None:
    """A definition of a tool in the form of OpenAI's chat completions; None for anything else."""
    if not isinstance(part, dict):
        return None
    function = next((part[key] for key in ("function", "toolSpec") if isinstance(part.get(key), dict)), part)
    schema: Any = next((function[key] for key in _SCHEMA if isinstance(function.get(key), dict)), None)
    described = schema is not None or ("function" in part and "description" in function)
    if not described or not isinstance(function.get("name"), str) or any(key in function for key in _ARGUMENTS):
        return None
    if isinstance(schema, dict) and isinstance(schema.get("json"), dict):
        schema = schema["json"]
    told = {"name": function["name"], "description": function.get("description"), "parameters": schema}
    return {"type": "function", "function": {key: value for key, value in told.items() if value is not None}}


def _definitions(listed: Any) -> Iterator[Any]:
    """The definitions of a request's tools; what the provider defines stands as it is logged."""
    for tool in listed if isinstance(listed, list) else [listed]:
        inner = tool
        if isinstance(tool, dict):
            inner = next(
                (
                    tool[key]
                    for key in ("functionDeclarations", "function_declarations", "tools")
                    if isinstance(tool.get(key), list)
                ),
                tool,
            )
        if inner is not tool:
            yield from _definitions(inner)
        elif tool:
            yield _definition(tool) or tool


def _call(call: Any) -> str:
    """A tool call in the form of Hermes' and Qwen's templates."""
    function = call if isinstance(call, dict) else {"name": str(call)}
    if isinstance(inner := function.get("function"), dict):
        function = inner
    arguments = next((function[key] for key in (*_ARGUMENTS, "parameters") if function.get(key) is not None), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {"text": arguments}
    name = function.get("name") or function.get("toolName") or function.get("type") or ""
    content = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{content}\n</tool_call>"


def _step(step: Any, where: str) -> Iterator[Message]:
    """Yield the messages of a step of SWE-agent's `trajectory`: the response or action, then the observation."""
    if not isinstance(step, dict):
        raise DatasetError(f"{where}: a step of 'trajectory' is not an object: give steps as SWE-agent writes them")
    said, action = (str(step.get(key) or "") for key in ("response", "action"))
    said = said or str(step.get("thought") or "")
    parts = (said,) if said and action in said else (said, action)
    yield Message("assistant", "\n".join(part for part in parts if part))
    yield _tool(str(step.get("observation") or ""))


def merged(messages: Iterable[Message]) -> tuple[Message, ...]:
    """The same conversation with adjacent messages of the same role joined and empty ones left out, as strict templates require."""
    out: list[Message] = []
    for message in messages:
        if not message.text.strip():
            continue
        if out and out[-1].role == message.role:
            between = "\n" if message.role == "assistant" and message.text.startswith("<tool_call>") else "\n\n"
            out[-1] = Message(message.role, f"{out[-1].text}{between}{message.text}")
        else:
            out.append(message)
    return tuple(out)
