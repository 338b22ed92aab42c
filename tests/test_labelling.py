"""Labels: which runs they take, what failures count as, and what is left behind."""

import itertools
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from tests.documents import ADOPT, DOCUMENTS, Told, asked, blending, figures, past_pilot, request, wordings

from dejakv.decide.plan import ReuseRequest
from dejakv.errors import ModelChangedError
from dejakv.idle import Settler
from dejakv.request import Sampling
from dejakv.store.base import ROWS


def test_a_hit_is_computed_in_full_and_its_shadow_is_one_blend(served: Any) -> None:
    made = pipeline, _ = blending(served)
    answer = asked(made)
    assert (answer.record.method, answer.record.stored) == ("prefix", True)
    engine: Any = pipeline.engine
    assert engine.ran == ["run"]
    assert pipeline.settle_one()
    assert not pipeline.settle_one()
    assert engine.ran == ["run", "blend"]
    assert figures(pipeline) == (1, 0, 0)


def test_a_shadow_leaves_nothing_behind(served: Any) -> None:
    """Its rows would serve later blends, and its state would be exact by name alone."""
    made = pipeline, _ = blending(served, max_generation=5)
    asked(made)
    pipeline.cache.flush()
    before = {meta.id for meta in pipeline.cache.store.metas()}
    counts = pipeline.cache.stats("default")
    assert pipeline.label_one()
    pipeline.cache.flush()
    after = list(pipeline.cache.store.metas())
    assert {meta.id for meta in after} == before
    assert not [meta for meta in after if meta.kind == ROWS]
    assert pipeline.cache.stats("default") == counts
    assert figures(pipeline) == (1, 0, 0)


@pytest.mark.parametrize(
    ("settings", "sampling", "wrong"),
    [
        ({}, Sampling(4, temperature=1.5, seed=3), 0),  # it is labelled by greedy answers
        ({"differs": "kl:0.05"}, Sampling(4), 0),
        ({"differs": "kl:1e-12"}, Sampling(4), 1),
    ],
)
def test_what_was_answered_does_not_say_runs_both_ways(
    served: Any, settings: dict[str, Any], sampling: Sampling, wrong: int
) -> None:
    pipeline, stream = blending(served, **settings)
    pipeline.answer(replace(next(stream), sampling=sampling))
    pipeline.engine.ran.clear()
    assert pipeline.label_one()
    assert pipeline.engine.ran == ["run", "blend"]
    assert figures(pipeline) == (1, wrong, 0)
    other = pipeline.cache.trust("somebody else")
    assert (other.explored, other.served, other.lost, other.classes) == (0, 0, 0, ())


def test_an_adopted_hit_is_labelled_by_a_run_of_its_donor(docs_engine: Any, served: Any) -> None:
    pipeline = served(replace(ADOPT, lexical_guard=False, error_bound=0.3, confidence=0.9, differs="answer"))
    one, other = wordings()
    pipeline.answer(request(one))
    past_pilot(pipeline, "adopt")
    engine = pipeline.engine = Told(docs_engine)
    assert "error bound" in pipeline.answer(request(other)).record.reason
    engine.ran.clear()
    assert pipeline.label_one()
    assert engine.ran == ["run"]
    assert figures(pipeline) == (1, 0, 0)


def test_a_client_who_leaves_is_labelled_all_the_same(served: Any) -> None:
    """Else answers that look wrong would be left out by those who see them."""
    pipeline, stream = blending(served)

    def leaves(_token: int, _text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline.answer(next(stream), on_token=leaves)
    assert pipeline.waiting == 1
    pipeline.engine.ran.clear()
    assert pipeline.label_one()
    assert pipeline.engine.ran == ["run", "blend"]
    assert figures(pipeline) == (1, 0, 0)


def test_nothing_is_kept_of_a_request_that_says_so(served: Any) -> None:
    pipeline, stream = blending(served)
    answer = pipeline.answer(replace(next(stream), no_store=True))
    assert answer.record.method == "prefix"
    assert "could not be checked" in answer.record.reason
    assert pipeline.waiting == 0
    assert figures(pipeline) == (0, 0, 0)


def test_a_named_donor_is_under_the_bound_too(served: Any) -> None:
    pipeline, stream = blending(served)
    wanted = next(stream)
    prepared = replace(pipeline.engine.prepare(wanted), epoch=pipeline.engine.epoch)
    second = next(document.text for document in DOCUMENTS if f" {document.text} <q>" in wanted.prompt)
    donor = next(meta for meta in pipeline.cache.store.metas() if second in meta.prompt)
    decision = pipeline.cache.find(
        prepared, ReuseRequest("blend", named=(donor.id,)), costs=pipeline.cache.costs(pipeline.engine)
    )
    assert decision.trial is not None
    assert (decision.trial.plan.method, decision.plan.approximate) == ("blend", False)
    assert "error bound" in str(decision)


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        (RuntimeError("out of order"), (1, 1, 0)),
        (ModelChangedError("another one"), (0, 0, 1)),
        (KeyboardInterrupt(), (1, 1, 0)),  # an end of the process
    ],
)
def test_a_run_that_fails_counts_as_wrong_and_a_model_that_changes_loses_the_label(
    served: Any, error: BaseException, counted: tuple[int, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    made = pipeline, _ = blending(served)
    asked(made)

    def fails() -> None:
        raise error

    pipeline.engine.fails = fails
    with suppress(KeyboardInterrupt):
        assert pipeline.label_one()
    assert figures(pipeline) == counted
    assert ("out of order" in caplog.text) == isinstance(error, RuntimeError)


@pytest.mark.parametrize("why", ["the donor is gone", "another model", "the plan ends in an exact answer"])
def test_labels_that_cannot_be_made_are_lost(served: Any, why: str) -> None:
    made = pipeline, _ = blending(served)
    asked(made)
    pipeline.engine.ran.clear()
    if why == "the donor is gone":
        for meta in list(pipeline.cache.store.metas()):
            pipeline.cache.store.delete(meta.id)
    elif why == "another model":
        pipeline.engine.epoch = "another epoch"
    else:
        pipeline.engine.refuses = "no blend today"
    assert pipeline.label_one()
    assert "blend" not in pipeline.engine.ran
    assert figures(pipeline) == (0, 0, 1)


def test_a_function_that_raises_counts_as_wrong(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = pipeline, _ = blending(served, differs=f"{__name__}:raising")
    asked(made)
    assert pipeline.label_one()
    assert figures(pipeline) == (1, 1, 0)
    assert "no opinion" in caplog.text


def raising(request: Any, full: str, reused: str) -> bool:
    raise ValueError("no opinion")


@pytest.mark.parametrize("ticks", [[0.0, 700.0], [0.0, 1.0, 700.0]])
def test_a_label_that_takes_too_long_counts_as_wrong(served: Any, ticks: list[float]) -> None:
    made = pipeline, _ = blending(served)
    asked(made)
    times = itertools.chain(ticks, itertools.repeat(ticks[-1]))
    settler = Settler(pipeline.engine, pipeline.cache, pipeline.run_plans, clock=lambda: next(times))
    assert settler.label_one()
    assert figures(pipeline) == (1, 1, 0)


def test_a_clock_that_is_set_back_or_forward_changes_nothing(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pipeline, _ = blending(served)
    asked(made)
    jumps = itertools.cycle([0.0, 4e9, -4e9])
    monkeypatch.setattr("time.time", lambda: next(jumps))
    assert pipeline.label_one()
    assert figures(pipeline) == (1, 0, 0)


def test_stopping_ends_a_label_at_its_next_token_and_counts_as_wrong(served: Any) -> None:
    made = pipeline, _ = blending(served)
    asked(made)
    pipeline.engine.fails = pipeline.stop_settling
    assert pipeline.label_one()
    assert figures(pipeline) == (1, 1, 0)
