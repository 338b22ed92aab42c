"""A prompt that was answered approximately is answered so again until idle time has made it exact."""

from dataclasses import replace
from typing import Any

import pytest
from tests.documents import ADOPT, DOCUMENT, EXACT, OTHER, request, uncached, wordings

from dejakv.engines.base import Completion
from dejakv.errors import ModelError
from dejakv.pipeline import Pipeline
from dejakv.request import Request

BLEND = replace(EXACT, reuse="blend", semantic_text=False)
MIXED = f"{OTHER.text} {DOCUMENT.text}"


def promoting(served: Any, config: Any) -> Pipeline:
    pipeline = served(config)
    pipeline.promotes = True
    return pipeline


@pytest.fixture
def blended(served: Any) -> tuple[Pipeline, Request]:
    """A pipeline that has blended a prompt, and the prompt."""
    pipeline, wanted = promoting(served, BLEND), request(wordings()[0], MIXED)
    pipeline.answer(request(wordings()[0]))
    assert pipeline.answer(wanted).record.method == "blend"
    return pipeline, wanted


def test_a_blended_prompt_is_blended_again_and_exact_after_idle_time(docs_engine: Any, blended: Any) -> None:
    pipeline, wanted = blended
    first, again = pipeline.answer(wanted), pipeline.answer(wanted)
    for answer in (first, again):
        assert (answer.record.method, answer.record.approximate, answer.record.stored) == ("blend", True, False)
    assert again.record.computed_tokens < 0.6 * again.record.prompt_tokens
    assert pipeline.cache.queue.counts.promotions == 1
    assert pipeline.promote_one()
    assert not pipeline.promote_one()
    exact = pipeline.answer(wanted)
    assert (exact.record.method, exact.record.computed_tokens, exact.cached_answer) == ("exact", 1, None)
    assert exact.token_ids == uncached(docs_engine, wanted).token_ids
    assert pipeline.cache.stats("default").promotions == 1


def test_adopted_prompts_likewise(docs_engine: Any, served: Any) -> None:
    pipeline = promoting(served, replace(ADOPT, lexical_guard=False))
    one, other = wordings()
    pipeline.answer(request(one))
    for _ in range(2):
        assert pipeline.answer(request(other)).record.method == "adopt"
    assert pipeline.promote_one()
    answer = pipeline.answer(request(other))
    assert (answer.record.method, answer.token_ids) == ("exact", uncached(docs_engine, request(other)).token_ids)


def test_idle_time_is_no_lookup_and_starts_from_the_exact_prefix(docs_engine: Any, served: Any) -> None:
    pipeline = promoting(served, replace(ADOPT, lexical_guard=False))
    one, other = wordings()
    pipeline.answer(request(one))
    pipeline.answer(request(other))
    counts = pipeline.cache.stats("default")
    engine = _Watched(docs_engine)
    pipeline.engine = engine
    assert pipeline.promote_one()
    after = pipeline.cache.stats("default")
    assert (after.lookups, after.hits, after.prefix_hits) == (counts.lookups, counts.hits, counts.prefix_hits)
    assert engine.done.computed_tokens < 0.2 * engine.done.prompt_tokens
    assert len(engine.done.token_ids) == 1


class _Watched:
    """An engine that shows its last completion."""

    done: Completion

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, *given: Any, **named: Any) -> Completion:
        self.done = self._engine.run(*given, **named)
        return self.done


def test_nothing_waits_where_nobody_promotes_or_nothing_is_to_be_kept(served: Any) -> None:
    pipeline = served(BLEND)
    pipeline.answer(request(wordings()[0]))
    assert pipeline.answer(request(wordings()[0], MIXED)).record.method == "blend"
    pipeline.promotes = True
    assert pipeline.answer(request(wordings()[0], MIXED, no_store=True)).record.method == "blend"
    assert not pipeline.promote_one()
    assert not Pipeline(pipeline.engine).promote_one()


def test_a_prompt_that_is_exact_meanwhile_is_passed_over(blended: Any) -> None:
    pipeline, wanted = blended
    assert pipeline.answer(replace(wanted, reuse="exact")).record.stored
    assert not pipeline.promote_one()
    assert pipeline.cache.stats("default").promotions == 0


def test_another_model_promotes_nothing(blended: Any) -> None:
    pipeline, _ = blended

    class Other(_Watched):
        epoch = "another epoch"

    pipeline.engine = Other(pipeline.engine)
    assert not pipeline.promote_one()
    assert pipeline.cache.queue.counts.promotions == 0


def test_a_failure_is_counted_and_the_prompt_forgotten(blended: Any, caplog: pytest.LogCaptureFixture) -> None:
    pipeline, wanted = blended

    class Broken(_Watched):
        def run(self, *given: Any, **named: Any) -> Completion:
            raise ModelError("out of order")

    engine, pipeline.engine = pipeline.engine, Broken(pipeline.engine)
    assert pipeline.promote_one()
    assert not pipeline.promote_one()
    counts = pipeline.cache.stats("default")
    assert (counts.promotions, counts.unpromoted) == (0, 1)
    assert "out of order" in caplog.text
    pipeline.engine = engine
    assert pipeline.answer(wanted).record.method == "blend"
