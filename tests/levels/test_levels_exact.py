"""Exact text: what counts as the same text, and that nothing else does."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejakv.decide.levels.base import Level, Query
from dejakv.decide.levels.exact import ExactTextCache
from dejakv.decide.literals import is_shouted, normalize, tokens
from dejakv.request import Request
from dejakv.testing.levels import LevelTests


class TestExactText(LevelTests):
    def make(self) -> Level:
        return ExactTextCache()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What color is the car?", "what color is the car?"),
        ("What color is the car?", "  What\tcolor  is the car?\n"),
        ("WHAT COLOR IS THE CAR?", "What color is the car?"),
        ("Where is Ann? Is it far?", "where is ann? is it far?"),
        ("caf\u00e9", "Cafe\u0301"),
        ("two\u00a0words", "two words"),
        ("a = 1\nb = 2", "\n\na = 1\nb = 2\n"),
    ],
)
def test_same_text(one: str, other: str) -> None:
    assert normalize(one) == normalize(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What color is the car?", "What colour is the car?"),
        ("1.5", "15"),
        ("the car's color", "the cars color"),
        ("a, b", "a b"),
        ("a-b", "a b"),
        ("caf\u00e9", "cafe"),
        ("?", "!"),
        ("(a)", "a"),
        ("What is 10⁶?", "What is 106?"),
        ("a != b", "a = b"),
        ("ls -A", "ls -a"),
        ("what is __init__", "what is init"),
        ("5!", "5"),
        ("join the US", "join the us"),
        ("call getName", "call getname"),
        ("Is it so?", "Is it so."),
        ("say 'a  b'", "say 'a b'"),
        ("if a:\n    b\n    c", "if a:\n    b\nc"),
        ("a\nb", "a b"),
        ("Maße", "Masse"),
        ("ｆｕｌｌ", "full"),
        ("5 ㎏", "5 kg"),
        ("open README.md", "open readme.md"),
    ],
)
def test_other_text(one: str, other: str) -> None:
    assert normalize(one) != normalize(other)


@given(st.text())
def test_normalizing_twice_changes_nothing(text: str) -> None:
    assert normalize(normalize(text)) == normalize(text)


@given(st.text(st.sampled_from("aB1²'\" `\n\t.!?-İßΣ\u0301")))
def test_normalizing_twice_changes_nothing_of_what_may_carry_meaning(text: str) -> None:
    assert normalize(normalize(text)) == normalize(text)


WORDS = [
    "The",
    "the",
    "US",
    "us",
    "I",
    "5",
    "Cal",
    "Mb.",
    "n!",
    "N!",
    "getName",
    "10⁶",
    "İx",
    "ΣΑΣ",
    "o'Clock",
    "?",
    '"Hi',
]


@given(st.lists(st.sampled_from(WORDS), min_size=1), st.booleans())
def test_normalize_folds_each_token_as_tokens_does(words: list[str], lines: bool) -> None:
    """Tokens in lower case are not looked at, but tell what the next one is."""
    text = unicodedata.normalize("NFC", " ".join(words) + ("\nif x:\n  pass" if lines else ""))
    shouted = is_shouted(text)
    folded = [" ".join(token.folded for token in tokens(line, shouted=shouted)) for line in text.splitlines()]
    normalized = [" ".join(line.split()) for line in normalize(text).splitlines()]
    assert normalized == [unicodedata.normalize("NFC", line) for line in folded]


@given(st.text())
def test_space_around_never_matters(text: str) -> None:
    assert normalize(f"\n{text}\n\n") == normalize(text)


def test_space_and_text_cannot_be_confused() -> None:
    level = ExactTextCache()
    level.add("one", Query(Request("r", "bc", "bc"), "a"))
    assert level.search(Query(Request("r", "c", "c"), "ab")).matches == ()


def test_lone_surrogates_do_no_harm() -> None:
    cache = ExactTextCache()
    cache.record("a \ud800 b", "x")
    assert cache.candidates(" a \ud800 b") == ["x"]
