"""Samples follow from the seed; the stream repeats itself and says how."""

import pytest

from dejakv.errors import DatasetError
from dejakv_models import docs
from dejakv_models.docs_facts import ATTRIBUTES


def test_the_set_has_as_many_samples_as_asked_and_is_the_same_twice() -> None:
    data = docs.DocsDataset(seed=3, samples=50, facts=6)
    first, second = list(data), list(data)
    assert first == second
    assert len(first) == len(data) == 50
    assert len({s.id for s in first}) == 50
    assert list(docs.DocsDataset(seed=4, samples=50, facts=6)) != first


def test_a_longer_set_begins_like_a_shorter_one() -> None:
    assert list(docs.DocsDataset(samples=30))[:10] == list(docs.DocsDataset(samples=10))


def test_each_document_is_asked_several_different_questions() -> None:
    samples = list(docs.DocsDataset(samples=12, facts=8, per_document=4))
    assert len({s.fields["documentId"] for s in samples}) == 3
    assert len({(s.context, s.fields["name"], s.fields["attribute"]) for s in samples}) == 12


def test_the_answer_is_a_value_in_the_context_and_the_question_names_the_person() -> None:
    for s in docs.DocsDataset(samples=40, wordings="held_out"):
        assert s.answer in ATTRIBUTES[s.fields["attribute"]].values
        assert s.answer in s.context.lower()
        assert s.fields["name"].capitalize() in s.question


def test_the_prompt_holds_document_and_question_between_the_markers() -> None:
    (s,) = docs.DocsDataset(samples=1)
    assert docs.prompt(s) == f"<s> {s.context} <q> {s.question} <a>" == docs.prompt_of(s.context, s.question)


def test_the_stream_repeats_documents_and_questions_and_varies_documents() -> None:
    samples = list(docs.DocsStream(seed=1, samples=400, documents=10))
    assert samples == list(docs.DocsStream(seed=1, samples=400, documents=10))
    seen = {s.fields["relation"] for s in samples}
    assert seen == {"new", "same_document", "repeat", "paraphrase", "reorder", "edit", "extend", "merge"}
    repeats = [s for s in samples if s.fields["relation"] == "repeat"]
    earlier: set[tuple[str, str]] = set()
    for s in samples:
        assert (s.fields["relation"] == "repeat") <= ((s.context, s.question) in earlier)
        earlier.add((s.context, s.question))
    assert 0.2 < len(repeats) / 400 < 0.4


def test_the_stream_says_which_remembered_answers_are_wrong() -> None:
    edits = [s for s in docs.DocsStream(seed=2, samples=300, documents=5) if s.fields["relation"] == "edit"]
    stale = [s for s in edits if s.fields["mustChange"]]
    assert stale
    assert all(s.fields["oldAnswer"] != s.answer for s in stale)
    assert all(s.fields["oldAnswer"] == s.answer for s in edits if not s.fields["mustChange"])


def test_popular_documents_come_far_more_often() -> None:
    sources = [s.fields["sourceId"] or s.fields["documentId"] for s in docs.DocsStream(samples=600, documents=20)]
    counts = sorted((sources.count(x) for x in set(sources)), reverse=True)
    assert counts[0] > 5 * counts[-1]


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(DatasetError, match="0 or more"):
        docs.DocsDataset(samples=-1)
    with pytest.raises(DatasetError, match="1 or more"):
        docs.DocsDataset(per_document=0)
    with pytest.raises(DatasetError, match="at least 1"):
        docs.DocsStream(documents=0)
    with pytest.raises(DatasetError, match="sum is at most 1"):
        docs.DocsStream(repeat=0.8, vary=0.3)
    with pytest.raises(DatasetError, match="docs-lm reads 2048"):
        next(iter(docs.DocsDataset(facts=300)))
