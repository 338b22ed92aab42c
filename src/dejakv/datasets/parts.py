"""The parts of a logged message in any format: text, calls of tools, their results, definitions.

Parts without text, such as pictures, are left out, and their types are named.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

CALL = re.compile(r"(tool_use|tool_calls?|_call)$|^function$")
RESULT = re.compile(r"(tool|call|function)\w*(result|response|output)$")
REASONING = re.compile(r"thinking|reasoning")
_MEDIA = re.compile(r"image|audio|video|file|media|inline_?data|base64|^url$")
_CALLS = ("functionCall", "function_call", "toolUse", "toolCall", "tool_call")
_RESULTS = ("functionResponse", "function_response", "toolResult", "tool_result")
_TEXTS = (
    "text", "content", "parts", "value", "message", "data", "output", "result", "response",
    "error", "source", "refusal",
)  # fmt: skip
_ARGUMENTS = ("arguments", "input", "args", "action", "code")
_SCHEMA = ("parameters", "input_schema", "inputSchema", "parametersJsonSchema")


def parse_json_text(value: Any) -> Any:
    """Return a value, parsed if it is a string that has a JSON object, array or string in it."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{", '"'):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            return value
        # Gateways encode what is JSON in a string already.
        return parse_json_text(inner) if isinstance(inner, str) else inner
    return value


def noun_with_safe_name(noun: str, name: str) -> str:
    """Return a noun with a name from a log behind it, as in `field 'suffix'`.

    A name that may be a user's text becomes `with another name`.
    """
    # Notes are printed and passed on, and another key may be a user's text.
    return (
        f"{noun} {name!r}" if re.fullmatch(r"[\w.:/-]{1,40}", name) else f"{noun} with another name"
    )


def joined(texts: Iterable[str]) -> str:
    """Return the texts that are not empty, a line each."""
    return "\n".join(text for text in texts if text)


def kind_of(part: Mapping[str, Any]) -> str:
    """Return the type of a part in small letters, with underscores."""
    return str(part.get("type") or "").lower().replace("-", "_")


def text_of(content: Any, left_out: set[str]) -> str:
    """Return the text of a content, without definitions of tools.

    Types of parts without text are added to `left_out`.
    """
    return joined(text for kind, text in pieces_of(content, left_out) if kind != "tool")


def pieces_of(part: Any, left_out: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a content in any format.

    Parameters
    ----------
    part : object
        A content: a string, a part, a list of them.
    left_out : set of str
        Takes the types of what is no text.

    Yields
    ------
    tuple of str and object
        `text`, `call` or `result`, each with its text, or `tool` with a definition.
    """
    if part is None:
        return

    if isinstance(part, str):
        yield "text", part
    elif isinstance(part, list):
        for each in part:
            yield from pieces_of(each, left_out)
    elif not isinstance(part, dict):
        yield "text", json.dumps(part)
    else:
        yield from _pieces_of_object(part, left_out)


def _pieces_of_object(part: dict[str, Any], left_out: set[str]) -> Iterator[tuple[str, Any]]:
    kind = kind_of(part)
    # Providers name the same thing differently, so that a part is told by its fields and its type.
    call = next((part[key] for key in _CALLS if isinstance(part.get(key), dict)), None)
    result = next((part[key] for key in _RESULTS if isinstance(part.get(key), dict)), None)

    if (tool := definition_of(part)) is not None:
        yield "tool", tool
    elif kind.startswith("tool_") and "toolCallId" in part and "input" in part:
        # A part of Vercel's SDK: a call with its result.
        yield "call", call_of({"name": kind.removeprefix("tool_"), "input": part["input"]})
        if part.get("output") is not None:
            yield "result", result_of(part["output"], left_out)
    elif call is not None or CALL.search(kind):
        yield "call", call_of(part if call is None else call)
    elif result is not None or RESULT.search(kind):
        yield "result", result_of(part if result is None else result, left_out)
    elif REASONING.search(kind) or "reasoningContent" in part or "thought" in part:
        left_out.add("reasoning")
    elif kind in ("document", "search_result") and (texts := _document_text(part)):
        yield "text", texts
    elif _MEDIA.search(kind) or kind == "document":
        left_out.add(noun_with_safe_name("parts of type", kind))
    else:
        key = next((key for key in _TEXTS if part.get(key) not in (None, "", [])), None)
        if key is None or (key == "source" and not isinstance(part[key], dict | list)):
            part_type = kind or next(
                (key for key in part if isinstance(part[key], dict | list | str)), ""
            )
            left_out.update(
                [noun_with_safe_name("parts of type", part_type)]
                if part and not any(key in part for key in _TEXTS)
                else []
            )
        else:
            yield from pieces_of(part[key], left_out)


def _document_text(part: Mapping[str, Any]) -> str:
    """Return the text of a document in a message, with its title; empty if it has none."""
    source = part.get("source")
    if isinstance(source, dict) and _MEDIA.search(kind_of(source)):
        return ""
    text = text_of(part.get("content") or source, set())
    return (
        joined([str(part.get("title") or ""), str(part.get("context") or ""), text]) if text else ""
    )


def result_of(value: Any, left_out: set[str]) -> str:
    """Return what a tool gave back, as text: parts by their text, other objects as JSON."""
    if isinstance(value, dict):
        inner = [
            value[key]
            for key in ("content", "output", "result", "response", "text", "error", "json")
            if value.get(key) is not None
        ]
        if inner:
            return result_of(inner[0], left_out)
        return json.dumps(
            {key: each for key, each in value.items() if key != "type"}, ensure_ascii=False
        )

    if isinstance(value, list) and all(
        isinstance(each, str) or (isinstance(each, dict) and _is_part(each)) for each in value
    ):
        return text_of(value, left_out)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _is_part(part: Mapping[str, Any]) -> bool:
    return "type" in part or len(part) == 1


def definition_of(part: Any) -> dict[str, Any] | None:
    """Return a definition of a tool in the form of OpenAI's chat completions; None for others."""
    if not isinstance(part, dict):
        return None
    function = next(
        (part[key] for key in ("function", "toolSpec") if isinstance(part.get(key), dict)), part
    )
    schema: Any = next(
        (function[key] for key in _SCHEMA if isinstance(function.get(key), dict)), None
    )
    described = schema is not None or ("function" in part and "description" in function)

    # A call has a name as well, but arguments in place of a schema.
    if (
        not described
        or not isinstance(function.get("name"), str)
        or any(key in function for key in _ARGUMENTS)
    ):
        return None

    if isinstance(schema, dict) and isinstance(schema.get("json"), dict):
        schema = schema["json"]
    function_fields = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": schema,
    }
    return {
        "type": "function",
        "function": {key: value for key, value in function_fields.items() if value is not None},
    }


def definitions_of(listed: Any) -> Iterator[Any]:
    """Yield the definitions of a request's tools in the form of OpenAI's chat completions.

    A tool without a definition in a known form, such as a provider's own, is yielded as logged.
    Empty ones are left out.

    Parameters
    ----------
    listed : Any
        The tools: a list, a single one, or objects that have them in a list of their own.
    """
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
        # Gemini and Bedrock wrap their definitions in a list of their own.
        if inner is not tool:
            yield from definitions_of(inner)
        elif tool:
            yield definition_of(tool) or tool


def call_of(call: Any) -> str:
    """Return a tool call in the form of Hermes' and Qwen's templates."""
    function = call if isinstance(call, dict) else {"name": str(call)}
    if isinstance(inner := function.get("function"), dict):
        function = inner

    arguments = next(
        (function[key] for key in (*_ARGUMENTS, "parameters") if function.get(key) is not None), {}
    )
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            # Templates expect an object; a code tool gets its text as it is.
            arguments = {"text": arguments}

    name = function.get("name") or function.get("toolName") or function.get("type") or ""
    content = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{content}\n</tool_call>"
