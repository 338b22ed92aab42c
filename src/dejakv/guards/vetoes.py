"""What no likeness of texts outweighs: other numbers or units, another negation, an opposite, another name.

A model that compares meanings is weakest where one word decides, and these words can be read.
"""

import re

from dejakv.guards.lexical import apart, opposed
from dejakv.guards.reading import UNITS, Reading

_WORD = re.compile(r"[^\W_][\w'’-]*")
_SENTENCE = re.compile(r"[.!?…]\s*$")
_CAPITAL_ANYWAY = frozenset({"i", "i'm", "i'd", "i'll", "i've"})


def veto(one: Reading, other: Reading, text: str, other_text: str) -> str:
    """Why two texts are different questions whatever they resemble, with counts and none of their words; empty if nothing says so.
    Symmetric but for its wording."""
    if one.negations != other.negations:
        return f"negations differ ({one.negations} against {other.negations})"
    if one.numbers != other.numbers:
        return f"numbers differ ({apart(one.numbers, other.numbers)})"
    if _units(one) != _units(other):
        return f"units differ ({apart(_units(one), _units(other))})"
    if opposed(set(one.content) - set(other.content), set(other.content) - set(one.content)):
        return "opposites"
    names, others = entities(text), entities(other_text)
    here, there = names - _words(other_text), others - _words(text)
    if here or there:
        return f"names differ ({len(here)} against {len(there)})"
    if names == others and _order(text, names) != _order(other_text, names):
        return f"the order of {len(names)} names differs"
    return ""


def entities(text: str) -> set[str]:
    """Names as far as writing shows them, in lower case: words with a capital that no sentence begins with, and words with several
    capitals or with digits and letters anywhere."""
    found: set[str] = set()
    for match in _WORD.finditer(text):
        word = match[0]
        before = text[: match.start()]
        begins = not before.strip() or _SENTENCE.search(before) is not None
        capitals = sum(letter.isupper() for letter in word)
        mixed = any(letter.isdigit() for letter in word) and any(letter.isalpha() for letter in word)
        if (capitals and not begins) or capitals > 1 or mixed:
            found.add(_bare(word))
    return found - _CAPITAL_ANYWAY


def _words(text: str) -> set[str]:
    return {_bare(word) for word in _WORD.findall(text)}


def _order(text: str, names: set[str]) -> list[str]:
    return [word for word in map(_bare, _WORD.findall(text)) if word in names]


def _bare(word: str) -> str:
    """In lower case, without the ending of a possessive."""
    return re.sub(r"['’]s?$", "", word.lower())


def _units(reading: Reading) -> list[str]:
    return sorted(word for word in reading.content if word in UNITS)
