"""Tokens of a text whose form carries meaning.

Examples are `10⁶`, `!=`, `-A`, `__init__`, `5!`, `US` beside `us`, and the indentation of code. A
token is what white space separates. Plain words and plain numbers may be written in several ways,
and every other token is literal.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

_QUOTES = "\"'“”‘’«»"
_OPENING = _QUOTES + "([{¿¡"
_CLOSING = ".,;:?…。？！，；：、"
_JOINT = re.compile(r"[-'’‐]")
_NUMBER = re.compile(r"[$€£]?\d+(?:[.,:]\d+)*[%$€£]?")
_SENTENCE_END = re.compile(rf"[.?!:…。？！][{_QUOTES})\]]*$")
_QUOTED = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|`[^`]*`|“[^”]*”|«[^»]*»")
_QUOTE = re.compile(r"[\"`“”«»]|(?<!\w)['‘’]")
_SPACE = re.compile(r"(\s+)")
_UNEVEN_SPACE = re.compile(r"\s\s|[^\S ]")
_SHOUTED_WORDS = 3
_COMMON_LENGTH = 40


@dataclass(frozen=True)
class Token:
    """A token of a line.

    Attributes
    ----------
    text : str
        The token as it stands.
    literal : str
        What another text must share, or empty for a plain word or number.
    word : str
        The plain word without the marks around it, or empty.
    """

    text: str
    literal: str = ""
    word: str = ""

    @property
    def folded(self) -> str:
        """The token with its word in lower case, unless the case carries meaning."""
        return self.text if self.literal else self.text.lower()


def tokens(line: str, *, shouted: bool = False) -> Iterator[Token]:
    """Yield the tokens of a line in Unicode NFC.

    Parameters
    ----------
    line : str
        One line in Unicode NFC.
    shouted : bool
        Whether the whole text is in capitals, so that they carry no meaning.

    Examples
    --------
    >>> [token.literal for token in tokens("Is n! more than 10⁶ in the US?")]
    ['', 'n!', '', '', '10⁶', '', '', 'US']
    """
    # White space alone separates tokens, so code such as `a[i]` stays in one piece.
    parts, before = line.split(), None
    for place, part in enumerate(parts):
        shape = _shape_of(part)
        yield _token(parts, place, shape, before, shouted)
        before = shape


def _token(
    parts: list[str], place: int, shape: "_Shape", before: "_Shape | None", shouted: bool
) -> Token:
    """Return the token at a place of a split line, by its shape and that of the token before."""
    part = parts[place]
    if shape.word:
        # A word alone may be a name, so it does not count as the beginning of a sentence.
        begins = before.ends_sentence if before else len(parts) > 1
        unit = before is not None and before.number
        cased = _is_cased(shape.word, begins=begins, unit=unit, shouted=shouted)
        return Token(part, shape.word if cased else "", shape.word)

    ends_question = place and place == len(parts) - 1 and not part.strip("?!？！…")
    return Token(part) if shape.plain_number or ends_question else Token(part, shape.bare or part)


def literals(text: str) -> tuple[str, ...]:
    """Return what another text must share to mean the same, in order.

    Beside literal tokens these are the indentation of lines, breaks beside lines with literal
    tokens, and quoted text with more than single spaces.
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


def normalize(text: str) -> str:
    """Normalize a text for comparison.

    A normalized text is its own normal form. It is in Unicode NFC. Plain words are in lower case,
    unless the case carries meaning (`US`, `getName`). White space is collapsed in texts of one line
    without quotes. Elsewhere it may be code, and only that around the text is trimmed. All marks
    and forms of digits stay.

    Examples
    --------
    >>> normalize("  The  car? ")
    'the car?'
    >>> normalize("10⁶") == normalize("106")
    False
    """
    text = unicodedata.normalize("NFC", text)
    lines = text.splitlines()
    # Line by line: the indentation of the first line with text must stay.
    while lines and not lines[0].strip():
        del lines[0]

    shouted = is_shouted(text)
    if len(text.strip().splitlines()) < 2 and not _QUOTE.search(text):
        folded = " ".join(_folded_parts(text, shouted))
    else:
        folded = "\n".join(_folded(line, shouted) for line in lines).rstrip()
    # Once more: lower case may take NFC apart, and equal texts must have one hash.
    return unicodedata.normalize("NFC", folded)


def _folded(line: str, shouted: bool) -> str:
    """Return a line with its tokens folded and its white space as it was."""
    if line == line.lower():
        return line
    folded = _folded_parts(line, shouted)
    return "".join(
        part if not part or part.isspace() else next(folded) for part in _SPACE.split(line)
    )


def _folded_parts(line: str, shouted: bool) -> Iterator[str]:
    """Yield the tokens of a line, folded."""
    parts = line.split()
    for place, part in enumerate(parts):
        # Most tokens are in lower case, where folding changes nothing.
        if part == part.lower():
            yield part
            continue
        before = _shape_of(parts[place - 1]) if place else None
        yield _token(parts, place, _shape_of(part), before, shouted).folded


def is_shouted(text: str) -> bool:
    """Return whether a text is all in capitals, with at least 3 words of more than 2 letters.

    Fewer words may be names.
    """
    if not text.isupper():
        return False
    words = sum(len(word) > 2 and word.isalpha() for word in re.findall(r"\w+", text))
    return words >= _SHOUTED_WORDS


@dataclass(frozen=True)
class _Shape:
    word: str
    bare: str
    plain_number: bool
    number: bool
    ends_sentence: bool


def _shape(part: str) -> _Shape:
    # Closing marks are stripped more widely from words than from numbers: "5!" is a formula.
    plain = part.lstrip(_OPENING).rstrip(_CLOSING + _QUOTES + "!)]}")

    bare = part.rstrip(_CLOSING)
    return _Shape(
        word=plain if _is_word(plain) and not _is_formula(part, plain) else "",
        bare=bare,
        plain_number=_is_stable(bare) and bool(_NUMBER.fullmatch(bare)),
        number=bool(_NUMBER.fullmatch(part)),
        ends_sentence=bool(_SENTENCE_END.search(part)),
    )


# Most tokens of a text are common words.
_common_shape = lru_cache(maxsize=16384)(_shape)


def _shape_of(part: str) -> _Shape:
    return _common_shape(part) if len(part) <= _COMMON_LENGTH else _shape(part)


def _is_word(text: str) -> bool:
    """Return whether a text is letters, with hyphens and apostrophes inside.

    Superscripts, ligatures and the like are other letters.
    """
    parts = _JOINT.split(text)
    return all(
        part
        and part[0].isalpha()
        and all(c.isalpha() or unicodedata.category(c)[0] == "M" for c in part)
        for part in parts
    ) and _is_stable(text)


def _is_stable(text: str) -> bool:
    # NFKC turns superscripts and ligatures into plain letters: such text is not plain.
    return unicodedata.is_normalized("NFKC", text)


def _is_formula(part: str, word: str) -> bool:
    """Return whether a mark behind a letter makes it a formula, as in `n!` and `f'`."""
    after = part[part.index(word) + len(word) :]

    return (len(word) == 1 and after[:1] == "!") or (
        len(word) < 3 and after[:1] in tuple("'’") and part[0] == word[0]
    )


def _is_cased(word: str, *, begins: bool, unit: bool, shouted: bool) -> bool:
    """Return whether the case of a word carries meaning, as in `US`, `getName`, `Mb` and `5 Cal`.

    The case of names and of words that begin a sentence carries none.
    """
    if word == word.lower() or shouted:
        return False

    parts = _JOINT.split(word)

    # The pronoun, which many write small.
    if parts[0] == "I":
        return False
    if all(part[1:] == part[1:].lower() for part in parts):
        return (unit or len(word) < 3) and not begins
    return True
