"""Top-layer reuse over the whole path, on the bundled layer-condensed model: what is served, kept, counted, bounded and refused."""

import random
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from tests.documents import BOUNDED, EXACT, hits, says, taught, uncached
from tests.test_pipeline_bound import trust, until_open

from dejakv import attach
from dejakv.build import build_cache
from dejakv.engines.open import ModelChoice, open_engine
from dejakv.errors import ConfigError, ModelError
from dejakv.experiments.vllm_engine import open_vllm
from dejakv.pipeline import Pipeline
from dejakv.request import Request, Sampling
from dejakv.trust.rules import PILOT
from dejakv_models import docs

RNG = random.Random(5)
DOCUMENT = docs.make_document(RNG, facts=16)
EDIT = docs.edit(DOCUMENT, RNG, facts=2, questions=2)
TOP = replace(EXACT, reuse="top_layer", similarity_threshold=0.6)


def request(context: str, question: str = "Who?", **more: Any) -> Request:
    prompt = docs.prompt_of(context, question)
    return Request("r", prompt, prompt, sampling=Sampling(4), **more)


@pytest.fixture(scope="module")
def condensed() -> Any:
    """docs-lckv in fp32."""
    return open_engine(ModelChoice("docs-lckv", dtype="fp32", device="cpu"), EXACT)


@pytest.fixture
def pipeline(condensed: Any) -> Any:
    """With the document as it was, and its state stored."""
    made = Pipeline(condensed, build_cache(TOP, condensed, background=False), promotes=True)
    assert made.answer(request(DOCUMENT.text)).record.stored
    yield made
    made.cache.close()


@pytest.mark.parametrize("question", EDIT.questions)
def test_an_edited_document_takes_the_top_layer_and_says_what_it_says(pipeline: Any, question: Any) -> None:
    answer = pipeline.answer(request(EDIT.target.text, question.text))
    record = answer.record
    assert answer.text == question.answer
    assert (record.method, record.level, record.approximate) == ("top_layer", "copied", True)
    assert record.statuses["kv_cache"] == "hit"
    assert record.plans.endswith(": top layer")
    report = answer.completion.details["blend"]
    assert report.rows[0] == record.prompt_tokens
    assert report.rows[-1] < 0.5 * record.prompt_tokens


def test_rewritten_text_is_found_by_similarity(pipeline: Any) -> None:
    changed = docs.change("paraphrase", DOCUMENT, random.Random(2), questions=1)
    answer = pipeline.answer(request(changed.target.text, changed.questions[0].text))
    assert (answer.record.method, answer.record.level) == ("top_layer", "semantic_text")
    assert answer.text == changed.questions[0].answer


def test_nothing_approximate_is_kept_and_idle_time_makes_it_exact(condensed: Any, pipeline: Any) -> None:
    wanted = request(EDIT.target.text, EDIT.questions[0].text)
    first = pipeline.answer(wanted)
    assert not first.record.stored
    assert [meta.id for meta in pipeline.cache.store.metas()] == [first.record.donor]
    assert pipeline.promote_one()
    again = pipeline.answer(wanted)
    assert (again.record.method, again.record.approximate) == ("exact", False)
    assert again.token_ids == uncached(condensed, wanted).token_ids


def test_no_store_and_partitions_hold(pipeline: Any) -> None:
    wanted = request(EDIT.target.text, EDIT.questions[0].text)
    other = pipeline.answer(replace(wanted, partition="other"))
    assert (other.record.method, other.record.donor) == ("none", None)
    kept_out = pipeline.answer(replace(wanted, no_store=True))
    assert kept_out.record.method == "top_layer"
    assert not pipeline.waiting
    assert pipeline.answer(replace(wanted, reuse="exact")).record.method in ("none", "prefix")


def test_a_request_that_asks_an_ordinary_model_is_answered_exactly(docs_engine: Any, served: Any) -> None:
    pipeline = served(EXACT)
    pipeline.answer(request(DOCUMENT.text))
    wanted = request(EDIT.target.text, reuse="top_layer")
    answer = pipeline.answer(wanted)
    assert not answer.record.approximate
    assert "every layer attends to its own KV" in answer.record.reason
    assert answer.token_ids == uncached(docs_engine, wanted).token_ids


@pytest.mark.slow
def test_an_error_bound_serves_it_once_it_was_right_often_enough(condensed: Any) -> None:
    bounded = replace(BOUNDED, reuse="top_layer", differs=says(iter(lambda: False, None)))
    pipeline = Pipeline(condensed, build_cache(bounded, condensed, background=False))
    taught(pipeline)
    *closed, opened = until_open(pipeline, hits())
    assert sum(answer.record.reason.startswith("error bound: ") for answer in closed) > PILOT
    assert (opened.record.method, opened.record.stored) == ("top_layer", False)
    report = trust(pipeline)
    assert (report.gate, report.served, report.wrong) == ("open", 1, 0)
    pipeline.cache.close()


def test_vllm_is_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="--reuse top_layer is of the transformers engine"):
        open_vllm(ModelChoice("docs-lckv", engine="vllm"), TOP)


def test_an_attached_model_takes_it_and_an_ordinary_one_is_refused(condensed: Any, docs_engine: Any) -> None:
    records: list[Any] = []
    with attach(condensed.model, condensed.tokenizer, TOP, on_record=records.append) as cache:
        for text in (DOCUMENT.text, EDIT.target.text):
            ids = condensed.tokenizer(docs.prompt_of(text, "Who?"), return_tensors="pt")["input_ids"]
            condensed.model.generate(ids, max_new_tokens=2)
            cache.flush()
    assert [record.method for record in records] == ["none", "top_layer"]
    with pytest.raises(ModelError, match="own KV"), attach(docs_engine.model, docs_engine.tokenizer, TOP):
        pass
    with closing(build_cache(TOP, docs_engine)) as plain, pytest.raises(ModelError, match="attends to its own KV"):
        Pipeline(docs_engine, plain)
