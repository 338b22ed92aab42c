"""Labels: which runs they take, what failures count as, and what is left behind."""

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from tests.asking import ADOPT, request, wordings
from tests.bounded import BOUNDED, DOCUMENTS, hits, taught

from dejakv.engines.base import costs_of
from dejakv.errors import ModelChangedError, ModelError
from dejakv.find.ask import Ask
from dejakv.find.bound import setting_of
from dejakv.labelling import Labeller
from dejakv.records import Method
from dejakv.request import Sampling
from dejakv.store.base import ROWS
from dejakv.trust.grid import PILOT


class Told:
    """An engine that tells what it ran, in front of another."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.ran: list[str] = []
        self.fails: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, *given: Any, **named: Any) -> Any:
        self.fails()
        self.ran.append("run")
        return self._engine.run(*given, **named)

    def blend(self, *given: Any, **named: Any) -> Any:
        self.fails()
        self.ran.append("blend")
        return self._engine.blend(*given, **named)


Made = tuple[Any, Any]


@pytest.fixture(scope="session")
def blending(docs_engine: Any) -> Callable[..., Made]:
    return lambda make, **more: _ready(make(replace(BOUNDED, **more)), docs_engine)


def _ready(pipeline: Any, engine: Any) -> Made:
    """A pipeline past its pilot, so that the next hit is labelled, and the stream of its hits."""
    taught(pipeline)
    _past_pilot(pipeline, "blend")
    pipeline.engine = Told(engine)
    return pipeline, hits()


def _past_pilot(pipeline: Any, method: Method) -> None:
    cache = pipeline.cache
    known = {"epoch": pipeline.engine.epoch, "method": method, "setting": setting_of(method, cache.config)}
    for number in range(PILOT):
        cache.gate.draw(partition="default", features={"score": 1 - number / PILOT}, **known)


def figures(pipeline: Any) -> tuple[int, int, int]:
    """Explored, wrong among these, and lost."""
    report = pipeline.cache.trust(None)
    assert report is not None
    return report.explored, report.explored_wrong, report.lost


def asked(made: Made) -> Any:
    """The answer to the next would-be hit, whose label waits."""
    pipeline, stream = made
    answer = pipeline.answer(next(stream))
    assert answer.record.reason.startswith("error bound: ")
    assert answer.record.approximate is False
    assert pipeline.waiting == 1
    return answer


def test_a_hit_is_computed_in_full_and_its_shadow_is_one_blend(served: Any, blending: Any) -> None:
    made = pipeline, _ = blending(served)
    answer = asked(made)
    assert (answer.record.method, answer.record.stored) == ("prefix", True)
    engine: Any = pipeline.engine
    assert engine.ran == ["run"]
    assert pipeline.run_errand()
    assert not pipeline.run_errand()
    assert engine.ran == ["run", "blend"]
    assert figures(pipeline) == (1, 0, 0)


def test_a_shadow_leaves_nothing_behind(served: Any, blending: Any) -> None:
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


def test_a_sampled_request_is_labelled_by_greedy_answers(served: Any, blending: Any) -> None:
    pipeline, stream = blending(served)
    pipeline.answer(replace(next(stream), sampling=Sampling(4, temperature=1.5, seed=3)))
    pipeline.engine.ran.clear()
    assert pipeline.label_one()
    assert pipeline.engine.ran == ["run", "blend"]
    assert figures(pipeline) == (1, 0, 0)


def test_kl_runs_both_ways(served: Any, blending: Any) -> None:
    made = pipeline, _ = blending(served, differs="kl:0.05")
    asked(made)
    pipeline.engine.ran.clear()
    assert pipeline.label_one()
    assert pipeline.engine.ran == ["run", "blend"]
    assert figures(pipeline) == (1, 0, 0)


def test_a_bound_of_no_divergence_at_all_is_broken(served: Any, blending: Any) -> None:
    made = pipeline, _ = blending(served, differs="kl:1e-12")
    asked(made)
    assert pipeline.label_one()
    assert figures(pipeline) == (1, 1, 0)


def test_an_adopted_answer_is_judged_without_a_run(docs_engine: Any, served: Any) -> None:
    """The donor's own answer is stored with it."""
    config = replace(ADOPT, lexical_guard=False, error_bound=0.3, confidence=0.9, differs="answer")
    pipeline = served(config)
    one, other = wordings()
    pipeline.answer(request(one))
    _past_pilot(pipeline, "adopt")
    engine = pipeline.engine = Told(docs_engine)
    assert "error bound" in pipeline.answer(request(other)).record.reason
    engine.ran.clear()
    assert pipeline.label_one()
    assert engine.ran == []
    assert figures(pipeline) == (1, 0, 0)


@pytest.mark.parametrize("sampling", [Sampling(4, temperature=1.0, seed=1), Sampling(3)])
def test_a_donor_s_answer_that_is_sampled_or_shorter_is_made_anew(docs_engine: Any, served: Any, sampling: Any) -> None:
    config = replace(ADOPT, lexical_guard=False, error_bound=0.3, confidence=0.9, differs="answer")
    pipeline = served(config)
    one, other = wordings()
    pipeline.answer(replace(request(one), sampling=sampling))
    _past_pilot(pipeline, "adopt")
    engine = pipeline.engine = Told(docs_engine)
    pipeline.answer(request(other))
    engine.ran.clear()
    assert pipeline.label_one()
    assert engine.ran == ["run"]
    assert figures(pipeline) == (1, 0, 0)


def test_a_run_that_fails_counts_as_wrong(served: Any, blending: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = pipeline, _ = blending(served)
    asked(made)

    def fails() -> None:
        raise RuntimeError("out of order")

    pipeline.engine.fails = fails
    assert pipeline.label_one()
    assert figures(pipeline) == (1, 1, 0)
    assert "out of order" in caplog.text


@pytest.mark.parametrize("error", [ModelChangedError("another one"), KeyboardInterrupt()])
def test_a_model_that_changes_and_an_end_of_the_process_lose_the_label(
    served: Any, blending: Any, error: BaseException
) -> None:
    made = pipeline, _ = blending(served)
    asked(made)

    def fails() -> None:
        raise error

    pipeline.engine.fails = fails
    with suppress(KeyboardInterrupt):
        assert pipeline.label_one()
    assert figures(pipeline) == (0, 0, 1)


def test_a_function_that_raises_counts_as_wrong(served: Any, blending: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = pipeline, _ = blending(served, differs=f"{__name__}:raising")
    asked(made)
    assert pipeline.label_one()
    assert figures(pipeline) == (1, 1, 0)
    assert "no opinion" in caplog.text


def raising(request: Any, full: str, reused: str) -> bool:
    raise ValueError("no opinion")


@pytest.mark.parametrize("ticks", [[0.0, 700.0], [0.0, 1.0, 700.0]])
def test_a_label_that_takes_too_long_counts_as_wrong(served: Any, blending: Any, ticks: list[float]) -> None:
    made = pipeline, _ = blending(served)
    asked(made)
    times = itertools.chain(ticks, itertools.repeat(ticks[-1]))
    labeller = Labeller(pipeline.engine, pipeline.cache, pipeline._run, pipeline._run, clock=lambda: next(times))
    assert labeller.label_one()
    assert figures(pipeline) == (1, 1, 0)


def test_a_clock_that_is_set_back_or_forward_changes_nothing(
    served: Any, blending: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pipeline, _ = blending(served)
    asked(made)
    jumps = itertools.cycle([0.0, 4e9, -4e9])
    monkeypatch.setattr("time.time", lambda: next(jumps))
    assert pipeline.label_one()
    assert figures(pipeline) == (1, 0, 0)


def test_a_donor_that_is_gone_loses_the_label(served: Any, blending: Any) -> None:
    made = pipeline, _ = blending(served)
    asked(made)
    for meta in list(pipeline.cache.store.metas()):
        pipeline.cache.store.delete(meta.id)
    pipeline.engine.ran.clear()
    assert pipeline.label_one()
    assert pipeline.engine.ran == []
    assert figures(pipeline) == (0, 0, 1)


def test_another_model_loses_the_label(served: Any, blending: Any) -> None:
    made = pipeline, _ = blending(served)
    asked(made)
    pipeline.engine.epoch = "another epoch"
    assert pipeline.label_one()
    assert figures(pipeline) == (0, 0, 1)


def test_a_plan_that_ends_in_an_exact_answer_loses_the_label(served: Any, blending: Any) -> None:
    made = pipeline, _ = blending(served)
    asked(made)

    def no_blend(*given: Any, **named: Any) -> Any:
        raise ModelError("no blend today")

    pipeline.engine.blend = no_blend
    assert pipeline.label_one()
    assert figures(pipeline) == (0, 0, 1)


def test_stopping_ends_a_label_at_its_next_token_and_loses_it(served: Any, blending: Any) -> None:
    made = pipeline, _ = blending(served)
    asked(made)
    pipeline.engine.fails = pipeline.stop_errands
    assert pipeline.label_one()
    assert figures(pipeline) == (0, 0, 1)


def test_a_client_who_leaves_is_labelled_all_the_same(served: Any, blending: Any) -> None:
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


def test_nothing_is_kept_of_a_request_that_says_so(served: Any, blending: Any) -> None:
    pipeline, stream = blending(served)
    answer = pipeline.answer(replace(next(stream), no_store=True))
    assert answer.record.method == "prefix"
    assert "could not be checked" in answer.record.reason
    assert pipeline.waiting == 0
    assert figures(pipeline) == (0, 0, 0)


def test_labels_are_of_their_own_partition(served: Any, blending: Any) -> None:
    made = pipeline, _ = blending(served)
    asked(made)
    assert pipeline.label_one()
    other = pipeline.cache.trust("somebody else")
    assert (other.explored, other.served, other.lost, other.classes) == (0, 0, 0, ())
    assert pipeline.cache.trust("default").explored == 1


def test_a_named_donor_is_under_the_bound_too(served: Any, blending: Any) -> None:
    pipeline, stream = blending(served)
    wanted = next(stream)
    prepared = replace(pipeline.engine.prepare(wanted), epoch=pipeline.engine.epoch)
    second = next(document.text for document in DOCUMENTS if f" {document.text} <q>" in wanted.prompt)
    donor = next(meta for meta in pipeline.cache.store.metas() if second in meta.prompt)
    decision = pipeline.cache.find(
        prepared, Ask("blend", named=(donor.id,)), costs=costs_of(pipeline.engine, BOUNDED.costs)
    )
    assert decision.trial is not None
    assert (decision.trial.plan.method, decision.plan.approximate) == ("blend", False)
    assert "error bound" in str(decision)
