"""Blend over the whole path: what is blended, from whom, and what is run where a blend would not pay."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.documents import ADOPT, DOCUMENT, EXACT, FACT, OTHER, request, uncached, wordings

from dejakv.blend.blend import BlendReport
from dejakv.blend.settings import BlendConfig, quality_of
from dejakv.engines.transformers import blending
from dejakv.store.base import StateInfo, StoredState
from dejakv_models.docs import ask, make_document


def test_a_prompt_with_too_little_in_common_is_not_blended_but_exact(docs_engine: Any, served: Any) -> None:
    pipeline = served(replace(ADOPT, reuse="blend"))
    question = wordings()[0]
    pipeline.answer(request(question, OTHER.text))
    wanted = request(question)
    answer = pipeline.answer(wanted)
    assert answer.record.method in ("none", "prefix")
    assert answer.record.reason
    assert not answer.record.approximate
    assert answer.record.stored
    assert answer.token_ids == uncached(docs_engine, wanted).token_ids


def test_a_blend_that_computes_more_than_the_exact_prefix_leaves_is_not_run(
    docs_engine: Any, served: Any, monkeypatch: Any
) -> None:
    """A conversation that goes on and repeats two sentences. The plan pays, but the token map shows more tokens to recompute."""
    rows_alone = (1e-3, 0.0, 0.0, 0.0)
    pipeline = served(
        replace(ADOPT, reuse="blend", copied_text=False, min_gain=8, min_gain_share=0.0, costs=rows_alone)
    )
    found = blending.map_donors

    def more(target: Any, *given: Any, **named: Any) -> Any:
        mapped, needed = found(target, *given, **named)
        return mapped, replace(needed, forced=np.arange(len(target)) >= needed.exact)

    monkeypatch.setattr(blending, "map_donors", more)
    pipeline.answer(request("Who?", DOCUMENT.text))
    again = " ".join(sentence.text for sentence in DOCUMENT.sentences[5:7])
    longer = request("Who?", f"{DOCUMENT.text} {OTHER.text} {again}")
    answer = pipeline.answer(longer)
    assert answer.record.method == "prefix"
    assert "the exact prefix is cheaper" in answer.record.reason
    assert answer.record.reused_tokens > 0.3 * answer.record.prompt_tokens
    assert answer.token_ids == uncached(docs_engine, longer).token_ids


def test_a_blend_from_two_prompts_answers_as_full_computation(docs_engine: Any, served: Any) -> None:
    """The passages of two documents in one prompt, the second first: each fact is read from where it was computed."""
    pipeline = served(replace(EXACT, reuse="blend", semantic_text=False, exact_prefix=False))
    one, other = DOCUMENT.text, OTHER.text
    for text in (one, other):
        assert pipeline.answer(request("Where is it?", text)).record.stored
    wanted = request(ask(FACT, random.Random(1)), f"{other} {one}")
    answer = pipeline.answer(wanted)
    report: BlendReport = answer.completion.details["blend"]
    assert (answer.record.method, answer.record.level, answer.record.approximate) == ("blend", "copied", True)
    assert report.share < 0.5
    assert (
        len(pipeline.cache.find(replace(docs_engine.prepare(wanted), epoch=docs_engine.epoch)).donor_search.donors) == 2
    )
    assert answer.text == uncached(docs_engine, wanted).text


def test_donors_that_are_together_longer_than_the_context_are_blended(docs_engine: Any, served: Any) -> None:
    """Each has its own positions, so only the prompt itself must fit."""
    documents = [make_document(random.Random(seed), facts=70) for seed in range(4)]
    pipeline = served(replace(EXACT, reuse="blend", semantic_text=False, exact_prefix=False))
    for document in documents:
        assert pipeline.answer(request("Where is it?", document.text)).record.stored
    parts = [" ".join(sentence.text for sentence in document.sentences[-20:]) for document in documents]
    wanted = request(ask(documents[2].facts[-1], random.Random(1)), " ".join(parts))
    answer = pipeline.answer(wanted)
    donors = pipeline.cache.find(replace(docs_engine.prepare(wanted), epoch=docs_engine.epoch)).donor_search.donors
    assert answer.record.method == "blend"
    assert sum(meta.num_tokens for meta in donors) > docs_engine.context > answer.record.prompt_tokens
    assert answer.text == uncached(docs_engine, wanted).text


def test_rows_of_the_exact_prefix_are_not_computed_in_a_blend(docs_engine: Any, served: Any) -> None:
    """A preamble that both prompts begin with, then passages in another order: the preamble stands as it was computed."""
    preamble, one, other = DOCUMENT.text, OTHER.text, " ".join(reversed(OTHER.text.split(". ")))
    pipeline = served(replace(EXACT, reuse="blend", semantic_text=False, costs=(1e-3, 0.0, 0.0, 0.0)))
    pipeline.answer(request("Where is it?", f"{preamble} {one} {other}"))
    wanted = request(ask(FACT, random.Random(1)), f"{preamble} {other} {one}")
    answer = pipeline.answer(wanted)
    assert answer.record.method == "blend"
    assert "blend behind the exact prefix" in answer.record.plans
    decision = pipeline.cache.find(replace(docs_engine.prepare(wanted), epoch=docs_engine.epoch))
    held = decision.exact.reused
    assert held > 50
    rows = answer.completion.details["blend"].active
    assert rows
    assert min(rows) >= held


def test_strict_computes_more_unless_new_text_takes_its_share(docs_engine: Any) -> None:
    """As docs/how-to/quality.md says: the shares count what is new, and beyond them all qualities compute the same rows."""
    rng = random.Random(5)
    old, new = (make_document(rng, facts=12).text for _ in range(2))
    asked = ask(make_document(rng, facts=5).facts[0], rng)
    donor = docs_engine.prepare(request(asked, old))
    state = docs_engine.full(donor).capture()
    held = [StoredState(StateInfo("donor", "default", docs_engine.epoch, donor.token_ids, old, old), state)]

    def shares(context: str) -> list[float]:
        target = docs_engine.prepare(request(asked, context))
        named = [quality_of(name) for name in ("strict", "default", "loose")]
        ways = [BlendConfig(selector=one.selector, share=one.share) for one in named]
        return [round(docs_engine.blend(target, held, way).details["blend"].share, 2) for way in ways]

    strict, default, loose = shares(f"Ann lives in Rome. {old}")
    assert strict == pytest.approx(0.4, abs=0.02)
    assert strict > default >= loose
    strict, default, loose = shares(f"{old} {new}")
    assert strict == default == loose > 0.4
