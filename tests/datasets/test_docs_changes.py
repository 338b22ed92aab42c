"""Each change keeps what it says it keeps, and says truly which answers must stay and which must change."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.errors import DatasetError
from dejakv_models import docs
from dejakv_models.docs_facts import ATTRIBUTES


def _doc(seed: int = 0, facts: int = 16) -> docs.Document:
    return docs.make_document(random.Random(seed), facts)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 40), st.sampled_from(docs.KINDS), st.sampled_from([1, 6, None]))
def test_every_question_is_answered_by_target_and_donor_as_recorded(
    seed: int, facts: int, kind: docs.Kind, questions: int | None
) -> None:
    change = docs.change(kind, _doc(seed, facts), random.Random(seed), questions=questions)
    assert change.kind == kind
    assert change.target.text != change.donor.text
    asked = [q.fact.key for q in change.questions]
    assert len(asked) == len(set(asked)) >= 1
    if questions is None:
        assert set(asked) == {f.key for f in change.target.facts}
    else:
        assert len(asked) <= questions
    for q in change.questions:
        assert q.answer == change.target.answer(*q.fact.key)
        assert q.old_answer == change.donor.answer(*q.fact.key)
        assert q.must_change == (q.answer != q.old_answer)
        assert q.fact.name.capitalize() in q.text
    assert set(change.must_stay) | set(change.must_change) == set(change.questions)
    assert {f for f in change.target.facts if change.donor.answer(*f.key) != f.value} == set(change.changed)


def test_a_paraphrase_states_the_same_facts_in_the_same_order_in_other_wordings() -> None:
    change = docs.paraphrase(_doc(), random.Random(1))
    assert change.target.facts == change.donor.facts
    assert not change.must_change
    pairs = zip(change.donor.sentences, change.target.sentences, strict=True)
    assert all(new.wording != old.wording for old, new in pairs if old.fact)


def test_a_paraphrase_of_a_share_leaves_the_rest_word_for_word() -> None:
    change = docs.paraphrase(_doc(facts=60), random.Random(1), share=0.3)
    same = sum(a == b for a, b in zip(change.donor.sentences, change.target.sentences, strict=True))
    assert 0.5 < same / len(change.donor.sentences) < 0.9


def test_a_paraphrase_can_use_wordings_that_training_never_saw() -> None:
    change = docs.paraphrase(_doc(), random.Random(1), wordings="held_out")
    for s in change.target.sentences:
        if s.fact:
            assert s.wording in ATTRIBUTES[s.fact.attribute].held_out_statements


def test_a_reordering_keeps_the_sentences() -> None:
    change = docs.reorder(_doc(facts=2), random.Random(1))
    assert sorted(s.text for s in change.target.sentences) == sorted(s.text for s in change.donor.sentences)
    assert change.target.sentences != change.donor.sentences
    assert not change.must_change


def test_a_document_of_one_sentence_cannot_be_reordered() -> None:
    one = docs.Document(docs.make_document(random.Random(0), 1, filler_share=0).sentences)
    with pytest.raises(DatasetError, match="at least 2 facts"):
        docs.reorder(one, random.Random(0))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 16), st.sampled_from(["train", "held_out"]))
def test_an_edit_changes_one_token_for_each_edited_fact(seed: int, facts: int, wordings: str) -> None:
    doc = docs.make_document(random.Random(seed), 16, wordings=wordings)  # type: ignore[arg-type]
    change = docs.edit(doc, random.Random(seed), facts=facts, questions=None)
    old, new = change.donor.text.split(), change.target.text.split()
    assert len(old) == len(new)
    assert sum(a != b for a, b in zip(old, new, strict=True)) == facts == len(change.changed) == len(change.must_change)
    assert change.target.tokens == change.donor.tokens
    for q in change.must_change:
        assert q.old_answer is not None
        assert q.answer in ATTRIBUTES[q.fact.attribute].values


def test_an_edit_asks_about_changed_facts_first_and_about_others_too() -> None:
    change = docs.edit(_doc(), random.Random(0), facts=3, questions=6)
    assert [q.must_change for q in change.questions] == [True] * 3 + [False] * 3


@pytest.mark.parametrize("facts", [0, 17])
def test_an_edit_of_more_facts_than_there_are_is_refused(facts: int) -> None:
    with pytest.raises(DatasetError, match="give 1 to 16"):
        docs.edit(_doc(), random.Random(0), facts=facts)


@pytest.mark.parametrize("where", ["end", "start", "inside"])
def test_an_extension_adds_facts_and_keeps_the_old_sentences_in_order(where: str) -> None:
    change = docs.extend(_doc(), random.Random(3), facts=5, where=where)  # type: ignore[arg-type]
    assert len(change.changed) == 5
    assert all(q.old_answer is None for q in change.must_change)
    kept = [s for s in change.target.sentences if s in change.donor.sentences]
    assert kept == list(change.donor.sentences)
    assert change.target.text.startswith(change.donor.text) == (where == "end")
    assert change.target.text.endswith(change.donor.text) == (where == "start")


def test_a_merge_holds_both_documents_whole() -> None:
    doc = _doc(facts=10)
    change = docs.merge(doc, random.Random(5))
    assert change.target.text.endswith(doc.text)
    assert len(change.target.facts) == 20
    assert change.must_stay
    assert change.must_change


def test_documents_that_speak_of_the_same_thing_are_not_merged() -> None:
    with pytest.raises(DatasetError, match="different things"):
        docs.merge(_doc(), random.Random(0), other=_doc())


def test_an_unrelated_document_shares_no_fact() -> None:
    change = docs.unrelated(_doc(facts=100), random.Random(0))
    assert not {f.key for f in change.target.facts} & {f.key for f in change.donor.facts}
    assert not change.must_stay


def test_growth_beyond_the_context_is_refused() -> None:
    doc = _doc(facts=180)
    for grow in (docs.merge, lambda d, r: docs.extend(d, r, facts=100)):
        with pytest.raises(DatasetError, match="docs-lm reads 2048"):
            grow(doc, random.Random(0))


def test_no_questions_and_unknown_kinds_are_refused() -> None:
    with pytest.raises(DatasetError, match="at least one question"):
        docs.reorder(_doc(), random.Random(0), questions=0)
    with pytest.raises(DatasetError, match="choose one of paraphrase, reorder"):
        docs.change("shuffle", _doc(), random.Random(0))  # type: ignore[arg-type]
