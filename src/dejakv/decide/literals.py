"""Tokens of a text whose very form carries meaning: `10⁶`, `!=`, `-A`, `__init__`, `5!`, `US` beside `us`, the indentation of code.

A token is what white space separates. Plain words and plain numbers may be written in several ways; every other token is literal.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

_QUOTES = "\"'“”‘’«»"
_OPENING = _QUOTES + "([{¿¡"
_CLOSING = ".,;:?…。？！，；：、"
_JOINT = re.compile(r"[-'’‐]")
_NUMBER = re.compile(r"[$€£]?\d+(?:[.,:]\d+)*[%$€£]?")
_SENTENCE_END = re.compile(rf"[.?!:…。？！][{_QUOTES})\]]*$")
_QUOTED = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|`[^`]*`|“[^”]*”|«[^»]*»")
_UNEVEN_SPACE = re.compile(r"\s\s|[^\S ]")
_SHOUTED_WORDS = 3


@dataclass(frozen=True)
class Token:
    """A token of a line.

    literal  what another text must share, or "" for a plain word or number
    word     the plain word without the marks around it, or ""
    """

    text: str
    literal: str = ""
    word: str = ""

    @property
    def folded(self) -> str:
        """The token with its word in lower case, unless the case carries meaning."""
        return self.text if self.literal else self.text.lower()


def tokens(line: str, *, shouted: bool = False) -> Iterator[Token]:
    """Read the tokens of a line in Unicode NFC; `shouted`: the text is all in capitals, so that they carry no meaning.

    >>> [token.literal for token in tokens("Is n! more than 10⁶ in the US?")]
    ['', 'n!', '', '', '10⁶', '', '', 'US']
    """
    parts = line.split()
    begins, number = len(parts) > 1, False  # a word alone may be a name
    for place, part in enumerate(parts):
        plain = part.lstrip(_OPENING).rstrip(_CLOSING + _QUOTES + "!)]}")
        bare = part.rstrip(_CLOSING)

        if _is_word(plain) and not _is_formula(part, plain):
            cased = _is_cased(plain, begins=begins, unit=number, shouted=shouted)
            yield Token(part, plain if cased else "", plain)
        elif (_is_stable(bare) and _NUMBER.fullmatch(bare)) or (
            place and place == len(parts) - 1 and not part.strip("?!？！…")
        ):
            yield Token(part)
        else:
            yield Token(part, bare or part)
        begins, number = bool(_SENTENCE_END.search(part)), bool(_NUMBER.fullmatch(part))


def literals(text: str) -> tuple[str, ...]:
    """Read what another text must share to mean the same, in order.

    Beside literal tokens these are the indentation of lines, breaks beside lines with literal tokens, and quoted text with more than
    single spaces.
    """
    text = unicodedata.normalize("NFC", text)
    # Of the whole text: a single line in capitals may be a name.
    shouted = is_shouted(text)
    lines = [line for line in text.splitlines() if line.strip()]
    shared: list[str] = []
    before = False

    for place, line in enumerate(lines):
        literal = [token.literal for token in tokens(line, shouted=shouted) if token.literal]
        indentation = line[: len(line) - len(line.lstrip())] if len(lines) > 1 else ""
        # Line breaks of prose may move; beside code they belong to it.
        if indentation or (place and (literal or before)):
            shared.append("\n" + indentation)
        shared += literal
        before = bool(literal)
    return (*shared, *(quoted for quoted in _QUOTED.findall(text) if _UNEVEN_SPACE.search(quoted)))


def is_shouted(text: str) -> bool:
    """Whether a text is all in capitals; a word or two may be names."""
    words = sum(len(word) > 2 and word.isalpha() for word in re.findall(r"\w+", text))
    return text.isupper() and words >= _SHOUTED_WORDS


def _is_word(text: str) -> bool:
    """Whether it is letters, with hyphens and apostrophes inside. Superscripts, ligatures and the like are other letters."""
    parts = _JOINT.split(text)
    return all(
        part and part[0].isalpha() and all(c.isalpha() or unicodedata.category(c)[0] == "M" for c in part)
        for part in parts
    ) and _is_stable(text)


def _is_stable(text: str) -> bool:
    # NFKC turns superscripts and ligatures into plain letters: such text is not plain.
    return unicodedata.is_normalized("NFKC", text)


def _is_formula(part: str, word: str) -> bool:
    """Whether a mark behind a letter makes it a formula: `n!`, `f'`."""
    after = part[part.index(word) + len(word) :]
    return (len(word) == 1 and after[:1] == "!") or (len(word) < 3 and after[:1] in tuple("'’") and part[0] == word[0])


def _is_cased(word: str, *, begins: bool, unit: bool, shouted: bool) -> bool:
    """Whether the case of a word carries meaning: `US`, `getName`, `Mb`, `5 Cal`; not that of names and sentences."""
    if word == word.lower() or shouted:
        return False
    parts = _JOINT.split(word)
    if parts[0] == "I":  # the pronoun, which many write small
        return False
    if all(part[1:] == part[1:].lower() for part in parts):
        return (unit or len(word) < 3) and not begins
    return True
