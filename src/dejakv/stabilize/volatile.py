"""Volatile lines of a prompt (dates, counters, reminders), moved behind the last user message.

Read are whole lines alone, outside of fenced code. In a user's message a reminder in tags that
stands before or behind the text is the program's; all else is the user's and stays.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence

from dejakv.stabilize.chat_body import ChatBody, texts_of
from dejakv.stabilize.spans import Span, splice, written

REMINDERS = (
    "system-reminder", "system_reminder", "internal_reminder", "reminder", "environment_details",
)  # fmt: skip
"""Tags of reminders that programs put into messages."""

MAX_LINE = 200
"""Characters of a line that may be a date or a counter."""

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DATE = (
    rf"\d{{4}}-\d\d-\d\d|\d{{1,2}}[./]\d{{1,2}}[./]\d{{4}}|{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?\b"
    rf"|\d{{1,2}}\.? {_MONTH}|\d{{1,2}}:\d\d"
)
_BEGIN = r"^[ \t>*#-]*(?:the\s+)?"
_DATED = re.compile(
    rf"{_BEGIN}(?:(?:current|today['’]?s|present|local|system)\s+)*"
    r"(?:(?:date|time|timestamp|datetime)(?:\s*(?:and|&|/)\s*time)?|today|now)(?:\s*+\([^)]*\))?"
    rf"\**\s*+(?:is|:|=)[^\n]{{0,40}}?(?:{_DATE})",
    re.IGNORECASE,
)
_NUMBER = r"\d[\d.,]*%?"
_COUNTED = re.compile(
    rf"{_BEGIN}(?:"
    rf"(?:step|turn|iteration|round|attempt|message|request)s?\s*[:=]?\s*{_NUMBER}"
    rf"\s*(?:/|of|out of)\s*{_NUMBER}"
    rf"|(?:tokens?|context|budget|time|cost)\s+(?:usage|used|left|remaining|elapsed|spent)"
    rf"\s*[:=]?\s*\$?{_NUMBER}(?:\s*(?:/|of|out of)\s*{_NUMBER})?(?:\s*[;,]\s*{_NUMBER}\s*\w+)?"
    r")(?:\s*(?:tokens?|left|remaining|used|s|seconds|minutes))?\s*\.?[ \t]*$",
    re.IGNORECASE,
)
_FENCE = re.compile(r"^[ \t]*```", re.MULTILINE)


def tagged_blocks(text: str, tags: Sequence[str]) -> list[tuple[int, int]]:
    """Return the places of blocks `<tag ...>...</tag>` that fill their lines, in linear time.

    A block ends before the line feed of its last line.
    """
    opening = re.compile(rf"^[ \t]*<({'|'.join(tags)})\b[^<>\n]*>", re.MULTILINE)
    blocks, unclosed, at = list[tuple[int, int]](), set[str](), 0
    while tag := opening.search(text, at):
        at = tag.end()
        # A tag that is never closed is looked for once.
        close = -1 if tag[1] in unclosed else text.find(f"</{tag[1]}>", at)
        if close < 0:
            unclosed.add(tag[1])
            continue
        at = close + len(tag[1]) + 3
        end = _line_end(text, at)
        if not text[at:end].strip():
            blocks.append((tag.start(), end))
            at = end
    return blocks


def volatile_lines(text: str) -> list[tuple[int, int]]:
    """Return the places of volatile lines and of blocks of them, without their last line feed."""
    fences = [fence.start() for fence in _FENCE.finditer(text)]
    # What is opened and never closed goes to the end.
    fences += [len(text)] * (len(fences) % 2)
    code = [
        (begin, _line_end(text, end)) for begin, end in zip(fences[::2], fences[1::2], strict=True)
    ]
    blocks = tagged_blocks(text, REMINDERS)
    lines = [
        line.span()
        for line in re.finditer(r"^.+$", text, re.MULTILINE)
        if line.end() - line.start() <= MAX_LINE
        and (_DATED.match(line[0]) or _COUNTED.match(line[0]))
    ]
    outside = [place for place in lines if not _overlaps(place, blocks)]
    return sorted(place for place in (*blocks, *outside) if not _overlaps(place, code))


def move_volatile(body: ChatBody) -> str:
    """Return the body's text with its volatile lines behind the last message of a user or a tool.

    Lines of system texts go there, and reminders of the last user message that stand at its begin.
    Behind them a tool's result may be the last; then reminders at its end go as well. Reminders
    stay where earlier user messages have some: a program that keeps them keeps its prefix.
    """
    users = [n for n, message in enumerate(body.messages) if message.field("role") == "user"]
    last = next(
        (
            n
            for n in reversed(range(len(body.messages)))
            if body.messages[n].field("role") in ("user", "tool")
        ),
        None,
    )
    content = body.messages[last].value.get("content") if last is not None else None
    if not users or last is None or content is None or not content.value:
        return body.text

    edits, moved = list[tuple[int, int, str]](), list[str]()
    for span in body.system_texts(last):
        places = volatile_lines(str(span.value))
        # A message without a text is another conversation.
        if places and _without(str(span.value), places).strip():
            _take(body.text, span, places, edits, moved)

    earlier = (body.messages[n] for n in users[:-1])
    if not any(
        _reminders(str(span.value)) != ([], [])
        for message in earlier
        for span in texts_of(message.value.get("content"))
    ):
        _take_reminders(body, users[-1], last, edits, moved)
    if moved:
        edits.append(_behind(content, "\\n".join(moved)))
    return splice(body.text, edits)


def _take_reminders(
    body: ChatBody, user: int, last: int, edits: list[tuple[int, int, str]], moved: list[str]
) -> None:
    """Take the reminders out of the last user message, or put those in parts behind the others."""
    content: Span | None = body.messages[user].value.get("content")
    if content is None or content.value is None:
        return
    if isinstance(content.value, list):
        if user == last:
            _reorder_parts(body.text, content, edits)
        return

    text = str(content.value)
    leading, trailing = _reminders(text)
    places = leading if user == last else [*leading, *trailing]
    rest = _without(text, places)
    if places and _without(rest, volatile_lines(rest)).strip():
        _take(body.text, content, places, edits, moved)


def _reorder_parts(text: str, content: Span, edits: list[tuple[int, int, str]]) -> None:
    parts: list[Span] = content.value
    texts = [str(part.field("text")) if part.field("type") == "text" else None for part in parts]
    blank = [
        each is not None and not _without(each, volatile_lines(each)).strip() for each in texts
    ]
    first = blank.index(False) if False in blank else 0
    if not all(_reminders(str(each)) != ([], []) for each in texts[:first]):
        return
    order = [*parts[first:], *parts[:first]]
    edits += [
        (slot.begin, slot.end, text[part.begin : part.end])
        for slot, part in zip(parts, order, strict=True)
        if slot is not part
    ]


def _reminders(text: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the places of the reminders before a text, and of those behind it."""
    blocks = tagged_blocks(text, REMINDERS)
    leading, at = list[tuple[int, int]](), 0
    for begin, end in blocks:
        if text[at:begin].strip():
            break
        # Line feeds around a reminder come and go with it.
        at = end
        while text.startswith("\n", at):
            at += 1
        leading.append((begin, max(end, at - 1)))
    trailing, at = list[tuple[int, int]](), len(text)
    for begin, end in reversed(blocks[len(leading) :]):
        if text[end:at].strip():
            break
        at = begin
        while at and text[at - 1] == "\n":
            at -= 1
        trailing.append((at, end))
    return leading, trailing[::-1]


def _take(
    text: str,
    span: Span,
    places: Sequence[tuple[int, int]],
    edits: list[tuple[int, int, str]],
    moved: list[str],
) -> None:
    """Cut lines out of a string as they are written, each with its line feed."""
    letters = written(text, span)
    moved += ["".join(letters[begin:end]) for begin, end in places]
    kept, at = list[str](), 0
    for begin, end in places:
        kept += letters[at:begin]
        at = end + 1
    edits.append((span.begin + 1, span.end - 1, "".join((*kept, *letters[at:]))))


def _without(text: str, places: Sequence[tuple[int, int]]) -> str:
    kept, at = list[str](), 0
    for begin, end in places:
        kept.append(text[at:begin])
        at = end + 1
    return "".join((*kept, text[at:]))


def _behind(content: Span, moved: str) -> tuple[int, int, str]:
    """Return the edit that puts a written text behind a message's content."""
    if isinstance(content.value, str):
        return content.end - 1, content.end - 1, f"\\n{moved}"
    return content.end - 1, content.end - 1, f', {{"type": "text", "text": "{moved}"}}'


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _overlaps(place: tuple[int, int], others: Sequence[tuple[int, int]]) -> bool:
    # The last one that begins before the place ends; they are sorted and apart.
    before = bisect_left(others, (place[1], 0)) - 1
    return before >= 0 and place[0] < others[before][1]
