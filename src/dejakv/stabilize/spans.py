"""JSON text with the place of each value, so that a body is changed without being written anew.

Whatever is not moved keeps its bytes: numbers, escapes and spaces are those of the client.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from dejakv.errors import InputError

MAX_DEPTH = 100
MAX_VALUES = 200_000

_SPACE = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null", re.ASCII)
# A character of a string as it is written: a pair of surrogates, an escape, or itself.
_LETTER = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\.|[^\\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Span:
    """Value of a JSON text with its place.

    Attributes
    ----------
    begin, end : int
        Place of its text.
    value : str, list[Span], dict[str, Span] or None
        A string, the items of a list or the fields of an object; None for any other value.
    key : int
        Place at which a field begins with its name; `begin` for what is no field.
    """

    begin: int
    end: int
    value: Any
    key: int

    def field(self, name: str) -> Any:
        """Return the content of a field of an object; None where there is none."""
        inner = self.value.get(name) if isinstance(self.value, dict) else None
        return None if inner is None else inner.value


def parse_spans(text: str) -> Span:
    """Parse a JSON text.

    Raises
    ------
    InputError
        For what is no JSON, a name that an object has twice, half of a surrogate pair, and more
        than `MAX_DEPTH` levels or `MAX_VALUES` values.
    """
    parser = _SpanParser(text)
    try:
        root = parser.value(_after_space(text, 0), 0)
    except InputError:
        raise
    except (ValueError, IndexError) as error:
        raise InputError("the body is no JSON: send one JSON object") from error
    if _after_space(text, root.end) != len(text):
        raise InputError("the body goes on behind its JSON: send one JSON object")
    return root


def splice(text: str, edits: Sequence[tuple[int, int, str]]) -> str:
    """Return the text with the places `begin` to `end` replaced; no two of them overlap."""
    pieces, at = list[str](), 0
    for begin, end, new in sorted(edits):
        pieces += (text[at:begin], new)
        at = end
    return "".join((*pieces, text[at:]))


def written(text: str, span: Span) -> list[str]:
    """Return each character of a string as it is written in the text, without the quotes."""
    return _LETTER.findall(text, span.begin + 1, span.end - 1)


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()


class _SpanParser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._count = 0

    def value(self, at: int, depth: int, key: int | None = None) -> Span:
        """Parse the value at a place."""
        self._count += 1
        if depth > MAX_DEPTH or self._count > MAX_VALUES:
            raise InputError("the body has too many values, or they are nested too deep: send less")

        key = at if key is None else key
        letter = self._text[at]
        if letter == '"':
            content, end = self._string(at)
            return Span(at, end, content, key)
        if letter in "[{":
            return self._container(at, depth, key, letter)
        scalar = _SCALAR.match(self._text, at)
        if scalar is None:
            raise ValueError
        return Span(at, scalar.end(), None, key)

    def _container(self, at: int, depth: int, key: int, letter: str) -> Span:
        items: list[Span] = []
        fields: dict[str, Span] = {}
        close = "]" if letter == "[" else "}"
        place = _after_space(self._text, at + 1)
        while self._text[place] != close or items or fields:
            if letter == "[":
                inner = self.value(place, depth + 1)
                items.append(inner)
            else:
                name, end = self._string(place)
                colon = _after_space(self._text, end)
                if self._text[colon] != ":":
                    raise ValueError
                inner = self.value(_after_space(self._text, colon + 1), depth + 1, place)
                if name in fields:
                    raise InputError("an object of the body has a name twice: send it once")
                fields[name] = inner

            place = _after_space(self._text, inner.end)
            if self._text[place] == close:
                break
            if self._text[place] != ",":
                raise ValueError
            place = _after_space(self._text, place + 1)

        return Span(at, place + 1, items if letter == "[" else fields, key)

    def _string(self, at: int) -> tuple[str, int]:
        if self._text[at] != '"':
            raise ValueError
        content, end = scanstring(self._text, at + 1, True)
        # Half of a pair is no text, and no server reads it alike.
        if "\\u" in self._text[at:end]:
            content.encode()
        return content, end
