"""Exact text: what counts as the same text, and that nothing else does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejakv.decide.levels.base import Level, Query
from dejakv.decide.levels.exact import ExactTextCache, normalize
from dejakv.request import Request
from dejakv.testing.levels import LevelTests


class TestExactText(LevelTests):
    def make(self) -> Level:
        return ExactTextCache()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What color is the car?", "what color is the car?"),
        ("What color is the car?", "  What\tcolor\n is the car "),
        ("What color is the car?", "What color is the car ?!"),
        ("Straße", "STRASSE"),
        ("ｆｕｌｌ ｗｉｄｔｈ？", "full width?"),
        ("ﬁne", "FINE"),
        ("caf\u00e9", "cafe\u0301"),
        ("two\u00a0words", "two words"),
        ("5 ㎏", "5 kg"),
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
    ],
)
def test_other_text(one: str, other: str) -> None:
    assert normalize(one) != normalize(other)


@given(st.text())
def test_normalizing_twice_changes_nothing(text: str) -> None:
    assert normalize(normalize(text)) == normalize(text)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_case_and_space_never_matter(text: str) -> None:
    assert normalize(f"  {text}\n\n") == normalize(text)
    assert normalize(text.casefold()) == normalize(text)


def test_space_and_text_cannot_be_confused() -> None:
    level = ExactTextCache()
    level.add("one", Query(Request("r", "bc", "bc"), "a"))
    assert level.search(Query(Request("r", "c", "c"), "ab")).matches == ()


def test_lone_surrogates_do_no_harm() -> None:
    cache = ExactTextCache()
    cache.record("a \ud800 b", "x")
    assert cache.candidates("A \ud800 b") == ["x"]
