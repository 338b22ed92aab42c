"""Bodies of OpenAI's chat completions and Anthropic's messages that the rules understand.

What is not known in full is no `ChatBody`: it is passed on as it is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dejakv.adopt.openai_body import ABOUT_THE_ANSWER
from dejakv.errors import InputError
from dejakv.stabilize.spans import Span, parse_spans

FIELDS = ABOUT_THE_ANSWER | {
    "model", "messages", "system", "tools", "tool_choice", "parallel_tool_calls", "response_format",
    "reasoning_effort", "verbosity", "thinking", "stop_sequences", "stop_token_ids",
    "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "cache_prompt", "id_slot",
    "length_penalty", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens", "add_generation_prompt", "chat_template_kwargs",
    "include_reasoning", "structured_outputs", "return_token_ids", "dejakv",
}  # fmt: skip
"""Fields of a body that the rules know. None of them names a place in the prompt."""

MARK = "cache_control"
"""Field of a part, a message or a tool: the prompt up to its end is to be cached."""

_MESSAGE = {
    "role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning",
    "reasoning_content", MARK,
}  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool")
_PARTS: Mapping[Any, set[str]] = {
    "text": {"type", "text", MARK},
    "tool_use": {"type", "id", "name", "input", MARK},
    "tool_result": {"type", "tool_use_id", "content", "is_error", MARK},
    # Of an assistant alone, whose messages no rule alters: the signature stays that of the text.
    "thinking": {"type", "thinking", "signature"},
    "redacted_thinking": {"type", "data"},
}
_FUNCTION = {"name", "description", "parameters", "strict"}
_ANTHROPIC_TOOL = {"type", "name", "description", "input_schema", "strict", MARK}


@dataclass(frozen=True)
class ChatBody:
    """A body with the places of its values.

    Attributes
    ----------
    text : str
        The body.
    root : Span
        Its object.
    """

    text: str
    root: Span

    @property
    def messages(self) -> list[Span]:
        """The messages, in order."""
        return self.root.field("messages")

    @cached_property
    def tools(self) -> dict[str, Span]:
        """The definitions of tools by name, in order."""
        return {_tool_name(tool): tool for tool in self.root.field("tools") or ()}

    @cached_property
    def marks_in_texts(self) -> bool:
        """Whether `system` or a message has a mark."""
        system = self.root.value.get("system")
        contents = (system, *(message.value.get("content") for message in self.messages))
        return any(MARK in message.value for message in self.messages) or any(
            map(_has_marks, contents)
        )

    def system_texts(self, before: int) -> Iterator[Span]:
        """Yield the texts of `system`, and those of system messages before a message."""
        yield from texts_of(self.root.value.get("system"))
        for message in self.messages[:before]:
            if message.field("role") in ("system", "developer"):
                yield from texts_of(message.value.get("content"))

    def prompt_text(self) -> str:
        """Return the names and texts that a template makes a prompt of, without the template."""
        pieces: list[str] = []
        for name in ("tools", "system", "messages"):
            if name in self.root.value:
                _add_texts(self.text, self.root.value[name], pieces)
        return "\n".join(pieces)


def read_chat_body(raw: bytes) -> ChatBody:
    """Read a body that the rules understand.

    Raises
    ------
    InputError
        For any other body; the message says what is not known of it.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise InputError("the body is not UTF-8: send JSON in UTF-8") from error

    root = parse_spans(text)
    if not isinstance(root.value, dict) or not root.field("messages"):
        raise InputError("the body has no messages")
    _check_names(root, FIELDS, "field")
    if isinstance(options := root.field("dejakv"), dict) and "parts" in options:
        raise InputError("parts of the prompt are named word for word")

    if not isinstance(root.field("messages"), list):
        raise InputError("messages is no list")
    for message in root.field("messages"):
        _check_message(message)
    if "system" in root.value:
        _check_content(root.value["system"], "system")
    _check_tools(root)
    return ChatBody(text, root)


def texts_of(content: Span | None) -> Iterator[Span]:
    """Yield the text of a message's content, or the texts of its parts."""
    if content is None:
        return
    if isinstance(content.value, str):
        yield content
    elif isinstance(content.value, list):
        for part in content.value:
            if part.field("type") == "text":
                yield part.value["text"]


def _has_marks(content: Span | None) -> bool:
    """Tell whether a part of a content has a mark, or one within the result of a tool."""
    return (
        content is not None
        and isinstance(content.value, list)
        and any(
            MARK in part.value or _has_marks(part.value.get("content")) for part in content.value
        )
    )


def _check_names(span: Span, known: set[str], noun: str) -> None:
    if not isinstance(span.value, dict):
        raise InputError(f"a {noun} stands where an object is expected")
    # A name of a client's is not repeated: it may be a text.
    if unknown := span.value.keys() - known:
        name = min(unknown)
        shown = name if name.isidentifier() and len(name) <= 40 else "a name"
        raise InputError(f"a {noun} is not known: {shown}")


def _check_message(message: Span) -> None:
    _check_names(message, _MESSAGE, "field of a message")
    if message.field("role") not in _ROLES:
        raise InputError("the role of a message is not known")
    if "content" in message.value:
        _check_content(message.value["content"], "content")


def _check_content(content: Span, name: str) -> None:
    if isinstance(content.value, str):
        return
    # An assistant that calls a tool has null for its content.
    if not isinstance(content.value, list):
        if content.value is None and content.end - content.begin == len("null"):
            return
        raise InputError(f"{name} is neither a text nor a list of parts")
    for part in content.value:
        kind = part.field("type")
        # Pictures, documents and whatever is new.
        if not isinstance(kind, str) or kind not in _PARTS:
            raise InputError("a message has parts that are neither text nor calls of tools")
        _check_names(part, _PARTS[kind], "field of a part")
        if kind == "text" and not isinstance(part.field("text"), str):
            raise InputError("a part of type text has no text")
        if kind == "tool_result" and "content" in part.value:
            _check_content(part.value["content"], "the result of a tool")


def _check_tools(root: Span) -> None:
    choice = root.field("tool_choice")
    if isinstance(choice, dict) and choice.keys() & {"name", "function", "tools", "allowed_tools"}:
        raise InputError("tool_choice names a tool")
    if "tools" not in root.value:
        return

    tools: Any = root.field("tools")
    if not isinstance(tools, list):
        raise InputError("tools is no list")
    for tool in tools:
        function = tool.value.get("function") if isinstance(tool.value, dict) else None
        if function is not None:
            _check_names(tool, {"type", "function", MARK}, "field of a tool")
            _check_names(function, _FUNCTION, "field of a function")
        else:
            _check_names(tool, _ANTHROPIC_TOOL, "field of a tool")
            if tool.field("type") not in (None, "custom"):
                raise InputError("a tool is the provider's own")
        if not isinstance(_tool_name(tool), str):
            raise InputError("a tool has no name")
    if len({_tool_name(tool) for tool in tools}) < len(tools):
        raise InputError("two tools have the same name")


def _tool_name(tool: Span) -> Any:
    function = tool.value.get("function")
    return (tool if function is None else function).field("name")


def _add_texts(text: str, span: Span, pieces: list[str]) -> None:
    if isinstance(span.value, str):
        pieces.append(span.value)
    elif isinstance(span.value, dict):
        for name, inner in span.value.items():
            # A mark goes from message to message, and the prompt stays as it is.
            if name == MARK:
                continue
            pieces.append(name)
            _add_texts(text, inner, pieces)
    elif isinstance(span.value, list):
        for inner in span.value:
            _add_texts(text, inner, pieces)
    else:
        pieces.append(text[span.begin : span.end])
