"""Documents and their words: what is stated is found again, and what cannot be made is refused with a remedy."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.datasets import docs
from dejakv.datasets.docs_document import RESERVED, check_length, draw_facts, state
from dejakv.datasets.docs_facts import ATTRIBUTES, FILLERS, NAMES, OPENINGS
from dejakv.errors import DatasetError


def _words(templates: tuple[str, ...]) -> set[str]:
    return {w for t in templates for w in re.findall(r"\w+", re.sub(r"\{\w\}", " ", t.lower()))}


def test_the_world_is_as_large_as_promised() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 60
    assert len(ATTRIBUTES) >= 6
    for attribute in ATTRIBUTES.values():
        assert len(set(attribute.values)) == len(attribute.values) >= 15
        assert len(attribute.statements) >= 5
        assert len(attribute.questions) >= 5


def test_names_and_values_are_not_words_of_the_wordings() -> None:
    words = set().union(*(_words(a.statements + a.questions) for a in ATTRIBUTES.values()), _words(FILLERS + OPENINGS))
    values = {v for a in ATTRIBUTES.values() for v in a.values}
    assert not words & set(NAMES)
    assert not words & values
    assert not values & set(NAMES)


def test_held_out_wordings_are_new_but_their_words_are_not() -> None:
    trained = _words(OPENINGS + FILLERS)
    for a in ATTRIBUTES.values():
        trained |= _words(a.statements + a.questions)
    for a in ATTRIBUTES.values():
        assert not set(a.statements) & set(a.held_out_statements)
        assert not set(a.questions) & set(a.held_out_questions)
        assert _words(a.held_out_statements + a.held_out_questions) <= trained


def test_every_statement_names_the_person_before_the_value_and_every_question_names_the_person() -> None:
    for a in ATTRIBUTES.values():
        for wording in a.statements + a.held_out_statements:
            assert 0 <= wording.index("{n}") < wording.index("{v}")
        for wording in a.questions + a.held_out_questions:
            assert wording.count("{n}") == 1
            assert "{v}" not in wording


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.sampled_from(["train", "held_out"]))
def test_a_document_states_each_of_its_facts_once_in_its_text(seed: int, facts: int, wordings: str) -> None:
    doc = docs.make_document(random.Random(seed), facts, wordings=wordings)  # type: ignore[arg-type]
    assert len(doc.facts) == len({f.key for f in doc.facts}) == facts
    assert doc.text == " ".join(s.text for s in doc.sentences)
    for sentence in doc.sentences:
        if sentence.fact:
            words = re.findall(r"\w+", sentence.text.lower())
            assert words.index(sentence.fact.name) < len(words) - 1 - words[::-1].index(sentence.fact.value)
            assert doc.answer(*sentence.fact.key) == sentence.fact.value


def test_the_same_seed_makes_the_same_document_and_another_seed_another() -> None:
    one, same, other = (docs.make_document(random.Random(s), 20) for s in (1, 1, 2))
    assert one == same
    assert one.id == same.id
    assert one.text != other.text
    assert one.id != other.id


def test_names_and_attributes_recur_so_that_neither_alone_finds_the_fact() -> None:
    documents = [docs.make_document(random.Random(s), 16) for s in range(50)]
    assert sum(len({f.name for f in d.facts}) < 16 for d in documents) > 40
    assert all(len({f.attribute for f in d.facts}) > 1 for d in documents)


def test_a_statement_avoids_the_wording_it_is_told_to() -> None:
    rng = random.Random(0)
    fact = docs.Fact("ann", "pet", "dog")
    avoid = ATTRIBUTES["pet"].statements[0]
    assert avoid not in {state(fact, rng, avoid=avoid).wording for _ in range(100)}


def test_too_long_a_document_is_refused_with_the_number_that_fits() -> None:
    with pytest.raises(DatasetError, match=r"docs-lm reads 2048.*ask for at most about \d+ facts") as error:
        docs.make_document(random.Random(0), 400)
    fits = int(re.search(r"about (\d+) facts", str(error.value)).group(1))  # type: ignore[union-attr]
    assert docs.make_document(random.Random(0), int(fits * 0.9)).tokens <= docs.CONTEXT - RESERVED


def test_the_length_check_passes_a_document_that_just_fits() -> None:
    sentence = docs.Sentence("word " * (docs.CONTEXT - RESERVED), None, "")
    assert check_length(docs.Document((sentence,))).tokens == docs.CONTEXT - RESERVED
    with pytest.raises(DatasetError, match="less filler"):
        check_length(docs.Document((sentence, docs.Sentence("one", None, ""))))


@pytest.mark.parametrize("count", [0, -3, 10_000])
def test_a_number_of_facts_that_cannot_be_stated_is_refused(count: int) -> None:
    with pytest.raises(DatasetError, match=r"between 1 and \d+ different"):
        docs.make_document(random.Random(0), count)


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_filler_share_that_is_no_probability_is_refused(share: float) -> None:
    with pytest.raises(DatasetError, match="from 0 to 1"):
        docs.make_document(random.Random(0), 3, filler_share=share)


def test_facts_avoid_what_is_taken_and_say_when_none_is_left() -> None:
    everything = frozenset((n, a) for n in NAMES for a in ATTRIBUTES)
    free = ("ann", "pet")
    (fact,) = draw_facts(random.Random(0), 1, everything - {free})
    assert fact.key == free
    with pytest.raises(DatasetError, match="between 1 and 0"):
        draw_facts(random.Random(0), 1, everything)
