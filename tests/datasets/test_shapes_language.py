"""Wordings: enough of them, none of the held-out ones trained on, and good English articles."""

import re

import pytest

from dejakv.datasets.shapes_language import (
    HELD_OUT,
    SEEN,
    VARIANTS,
    Reference,
    noun_phrase,
    pieces,
    templates,
    wording,
)
from dejakv.datasets.shapes_programs import KINDS
from dejakv.datasets.shapes_scene import COLORS, SHAPES, SIZES


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_five_wordings_and_more_held_out(kind: str) -> None:
    assert len(set(SEEN[kind])) >= 5
    assert len(set(HELD_OUT[kind])) >= 2
    assert not set(SEEN[kind]) & set(HELD_OUT[kind])
    assert templates(kind, "all") == SEEN[kind] + HELD_OUT[kind]


def _words(texts: dict[str, tuple[str, ...]]) -> set[str]:
    return set(re.findall(r"[a-z]+", " ".join(t for ts in texts.values() for t in ts).lower()))


def test_held_out_wordings_say_trained_words_in_new_ways() -> None:
    assert _words(HELD_OUT) <= _words(SEEN)


def test_no_two_things_are_called_alike() -> None:
    phrases = [noun_phrase(Reference(s, c, z), v) for s in SHAPES for c in COLORS for z in SIZES for v in (0, 1)]
    assert len(set(phrases)) == len(phrases)


def test_synonyms_and_plurals() -> None:
    assert noun_phrase(Reference("ball", "gray", "large")) == "large gray ball"
    assert noun_phrase(Reference("ball", "gray", "large"), 1) == "big grey sphere"
    assert noun_phrase(Reference("cube"), 1, plural=True) == "boxes"
    assert noun_phrase(Reference("cross"), plural=True) == "crosses"
    assert noun_phrase(Reference(color="red"), plural=True) == "red things"


def test_an_goes_before_a_vowel() -> None:
    assert wording("exist", (Reference("ball", "orange"),), "Is there a {a}?") == "Is there an orange ball?"
    assert wording("exist", (Reference("ball", "red"),), "Is there a {a}?") == "Is there a red ball?"


def test_each_of_two_things_has_its_own_synonym() -> None:
    both = (Reference("ball"), Reference("cube"))
    said = {wording("left", both, "Is the {a} left of the {b}?", v) for v in range(VARIANTS)}
    assert said == {f"Is the {a} left of the {b}?" for a in ("ball", "sphere") for b in ("cube", "box")}


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_point_at_the_things(kind: str) -> None:
    references = (Reference("ball", "red"), Reference("cube"))
    references = references if "{b}" in SEEN[kind][0] else references[:1]
    for template in templates(kind, "all"):
        parts = pieces(kind, references, template)
        assert [index for _, index in parts if index is not None] == list(range(len(references)))
        assert "{" not in "".join(text for text, _ in parts)
