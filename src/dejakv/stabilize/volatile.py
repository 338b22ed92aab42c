"""Volatile lines of a prompt (dates, counters, reminders), moved behind the last user message.

Read are whole lines alone, outside of fenced code, front matter and tags. In a user's message a
reminder in tags that stands before or behind the text is the program's; all else stays.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from dejakv.stabilize.chat_body import ChatBody, texts_of
from dejakv.stabilize.spans import Span, splice, written

REMINDERS = (
    "system-reminder", "system_reminder", "internal_reminder", "reminder", "environment_details",
)  # fmt: skip
"""Tags of reminders that programs put into messages."""

MAX_LINE = 200
"""Characters of a line that may be a date or a counter."""

# A quoted line, a heading, an item of a list or of code, which is no line of the program's.
_BEGIN = r"(?P<mark>\ {4}|\ *\t|[ \t]*(?:[>#+-]|\*(?!\*)|\d+[.)]\s))?+[ \t>*#+-]*+(?:the\s+)?"
_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
    r"|sep(?:t(?:ember)?)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_CLOCK = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?"
_DATE = (
    r"\d{4}[-/]\d{1,2}[-/]\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{4}"
    rf"|{_MONTH}\s\d{{1,2}}(?:st|nd|rd|th)?\b|\d{{1,2}}(?:st|nd|rd|th|\.)?\s(?:of\s)?{_MONTH}|{_CLOCK}"
)
_ZONE = (
    r"utc|gmt|z\b|(?:[ecmp]|ce|we|ee|ak|j|k|i|b|ae|ac|aw|nz|ms)[sd]?t\b|[+-]\d\d?(?::?\d\d)?\b"
    r"|(?-i:[A-Z][a-z]+/[A-Z][A-Za-z_/]+)"
)
_BESIDE_DATE = (
    r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\b|the\b|at\b|local\b"
    rf"|time\b|[ap]\.?m\b\.?|t(?=\d)|{_ZONE}|\d{{4}}\b|[ \t,.;()*]"
)
_DATED = re.compile(
    rf"{_BEGIN}(?:(?:current|today['’]?s|present|local|system)\s+)*"
    r"(?P<kind>date|time|timestamp|datetime|today|now)(?:\s*(?:and|&|/)\s*time)?"
    rf"(?:\s*+\((?:[\w/:+-]+|local time)\))?\**\s*+(?:is|:|=)"
    rf"(?=.*?(?:{_DATE}))(?:{_DATE}|{_BESIDE_DATE})++$",
    re.IGNORECASE,
)
_NUMBER = r"\d[\d.,]*%?"
_OF_NUMBER = rf"\s*(?:/|of|out of)\s*{_NUMBER}"
_UNIT = r"(?:\s*(?:tokens?|left|remaining|used|s|seconds|minutes))?\s*\.?[ \t]*$"
_COUNTED = re.compile(
    rf"{_BEGIN}(?P<kind>"
    r"(?:step|turn|iteration|round|attempt|message|request)"
    rf"(?=s?\s*[:=]?\s*{_NUMBER}{_OF_NUMBER}{_UNIT})"
    r"|(?:tokens?|context|budget|time|cost)\s+(?:usage|used|left|remaining|elapsed|spent)"
    rf"(?=\s*[:=]?\s*\$?{_NUMBER}(?:{_OF_NUMBER})?(?:\s*[;,]\s*{_NUMBER}\s*\w+)?{_UNIT})).*",
    re.IGNORECASE,
)
_FENCE = re.compile(r"^[ \t>*+-]*(?:\d+[.)][ \t]+)?(`{3,}+(?!.*`)|~{3,})", re.MULTILINE)
_FRONT_MATTER = re.compile(
    r"^(---|\+\+\+)[ \t]*\n(?:(?:[\w\"'][^:=\n]*[:=]|[ \t#-]).*\n)*?\1[ \t]*$", re.MULTILINE
)
_TAG = re.compile(r"<(/?)([a-z][\w:.-]*+)(?=[\s>/])[^<>]*(?<!/)>", re.IGNORECASE)


def tagged_blocks(text: str, tags: Sequence[str]) -> list[tuple[int, int]]:
    """Return the places of blocks `<tag ...>...</tag>` that fill their lines, in linear time.

    A block ends before the line feed of its last line. In none is another opening of its tag.
    """
    names = "|".join(tags)
    opening = re.compile(rf"^[ \t]*<({names})(?=[\s>/])[^<>\n]*(?<!/)>", re.MULTILINE)
    again = {tag: re.compile(rf"<{tag}(?=[\s>/])") for tag in tags}
    blocks, unclosed, at = list[tuple[int, int]](), set[str](), 0
    while tag := opening.search(text, at):
        at = tag.end()
        # A tag that is never closed is looked for once.
        close = -1 if tag[1] in unclosed else text.find(f"</{tag[1]}>", at)
        if close < 0:
            unclosed.add(tag[1])
            continue
        nested = again[tag[1]].search(text, at, close)
        at = close + len(tag[1]) + 3
        end = _line_end(text, at)
        if nested is None and not text[at:end].strip():
            blocks.append((tag.start(), end))
            at = end
    return blocks


def volatile_lines(text: str) -> list[tuple[int, int]]:
    """Return the places of volatile lines and of blocks of them, without their last line feed.

    Lines in fenced code, in front matter and in tags of any name are not the program's. Neither
    are those of a kind that a text has twice, so that no line moves then.
    """
    blocks, lines = _candidates(text)
    apart = _merged(
        place for place in (*_fenced(text), *_enclosed(text)) if not _within(place, blocks)
    )
    blocks = [place for place in blocks if not _overlaps(place, apart)]
    outside = [line for line in lines if not _overlaps(line.span(), apart)]
    kinds = [line["kind"].lower() for line in outside]
    if len({*kinds}) < len(kinds):
        return blocks
    return sorted((*blocks, *(line.span() for line in outside if line["mark"] is None)))


def _candidates(text: str) -> tuple[list[tuple[int, int]], list[re.Match[str]]]:
    """Return the places of reminders, and the lines outside of them with a date or a counter."""
    blocks = tagged_blocks(text, REMINDERS)
    lines = (
        _DATED.match(text, *line.span()) or _COUNTED.match(text, *line.span())
        for line in re.finditer(r"^.+$", text, re.MULTILINE)
        if line.end() - line.start() <= MAX_LINE
    )
    return blocks, [line for line in lines if line and not _overlaps(line.span(), blocks)]


def _fenced(text: str) -> Iterator[tuple[int, int]]:
    """Yield the places of fenced code and of front matter."""
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif (
            fence[1].startswith(opened[1])
            and not text[fence.end() : (end := _line_end(text, fence.end()))].strip()
        ):
            yield opened.start(), end
            opened = None
    # What is opened and never closed goes to the end.
    if opened is not None:
        yield opened.start(), len(text)
    for matter in _FRONT_MATTER.finditer(text):
        yield matter.span()


def _enclosed(text: str) -> Iterator[tuple[int, int]]:
    """Yield the places between tags, from the first opening to its closing."""
    opened: dict[str, list[int]] = {}
    for tag in _TAG.finditer(text):
        # Where the outermost begins, how many are open, and the last closing.
        place = opened.get(tag[2])
        if not tag[1]:
            opened.setdefault(tag[2], [tag.start(), 0, 0])[1] += 1
        elif place is not None:
            place[1:] = place[1] - 1, tag.end()
            if not place[1]:
                del opened[tag[2]]
                yield place[0], tag.end()
    yield from ((begin, end) for begin, _, end in opened.values() if end)


def move_volatile(body: ChatBody) -> str:
    """Return the body's text with its volatile lines behind the last message of a user or a tool.

    Lines of system texts go there, and reminders of the last user message that stand at its begin.
    Behind them a tool's result may be the last; then reminders at its end go as well. Reminders
    stay where earlier user messages have some: a program that keeps them keeps its prefix. Where
    texts have a mark all stays, since a line would move across it.
    """
    if body.marks_in_texts:
        return body.text
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
    if places and not _is_blank(rest):
        _take(body.text, content, places, edits, moved)


def _reorder_parts(text: str, content: Span, edits: list[tuple[int, int, str]]) -> None:
    parts: list[Span] = content.value
    texts = [str(part.field("text")) if part.field("type") == "text" else None for part in parts]
    blank = [each is not None and _is_blank(each) for each in texts]
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


def _is_blank(text: str) -> bool:
    """Tell whether a text has nothing but reminders, dates and counters."""
    blocks, lines = _candidates(text)
    return not _without(text, sorted((*blocks, *(line.span() for line in lines)))).strip()


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


def _within(place: tuple[int, int], others: Sequence[tuple[int, int]]) -> bool:
    before = bisect_left(others, (place[0] + 1, 0)) - 1
    return before >= 0 and place[1] <= others[before][1]


def _merged(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return places in order, those that overlap as one."""
    merged = list[tuple[int, int]]()
    for begin, end in sorted(places):
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged
