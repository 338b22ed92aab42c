"""Labels: which runs they take, what failures count as, and what is left behind."""

from dataclasses import replace
from typing import Any

import pytest
from tests.asking import ADOPT, request, wordings
from tests.bounded import DOCUMENTS
from tests.labelled import Told, asked, blending, figures, past_pilot

from dejakv.decide.plan import Ask
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


def test_a_sampled_request_is_labelled_by_greedy_answers(served: Any) -> None:
    pipeline, stream = blending(served)
    pipeline.answer(replace(next(stream), sampling=Sampling(4, temperature=1.5, seed=3)))
    pipeline.engine.ran.clear()
    assert pipeline.label_one()
    assert pipeline.engine.ran == ["run", "blend"]
    assert figures(pipeline) == (1, 0, 0)


def test_kl_runs_both_ways(served: Any) -> None:
    made = pipeline, _ = blending(served, differs="kl:0.05")
    asked(made)
    pipeline.engine.ran.clear()
    assert pipeline.label_one()
    assert pipeline.engine.ran == ["run", "blend"]
    assert figures(pipeline) == (1, 0, 0)


def test_a_bound_of_no_divergence_at_all_is_broken(served: Any) -> None:
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
    past_pilot(pipeline, "adopt")
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
    past_pilot(pipeline, "adopt")
    engine = pipeline.engine = Told(docs_engine)
    pipeline.answer(request(other))
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


def test_labels_are_of_their_own_partition(served: Any) -> None:
    made = pipeline, _ = blending(served)
    asked(made)
    assert pipeline.label_one()
    other = pipeline.cache.trust("somebody else")
    assert (other.explored, other.served, other.lost, other.classes) == (0, 0, 0, ())
    assert pipeline.cache.trust("default").explored == 1


def test_a_named_donor_is_under_the_bound_too(served: Any) -> None:
    pipeline, stream = blending(served)
    wanted = next(stream)
    prepared = replace(pipeline.engine.prepare(wanted), epoch=pipeline.engine.epoch)
    second = next(document.text for document in DOCUMENTS if f" {document.text} <q>" in wanted.prompt)
    donor = next(meta for meta in pipeline.cache.store.metas() if second in meta.prompt)
    decision = pipeline.cache.find(
        prepared, Ask("blend", named=(donor.id,)), costs=pipeline.cache.costs(pipeline.engine)
    )
    assert decision.trial is not None
    assert (decision.trial.plan.method, decision.plan.approximate) == ("blend", False)
    assert "error bound" in str(decision)
