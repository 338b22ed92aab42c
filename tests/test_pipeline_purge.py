"""A purge while idle time computes: nothing of what was purged is stored afterwards."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.documents import BOUNDED, DOCUMENT, EXACT, OTHER, hits, request, taught, wordings

from dejakv.engines.base import Completion
from dejakv.pipeline import Pipeline
from dejakv.request import Sampling
from dejakv.store.selection import Selection
from dejakv.trust.rules import PILOT

MIXED = f"{OTHER.text} {DOCUMENT.text}"


class Held:
    """An engine that waits in the middle of a run, when its answer is complete."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, *given: Any, **named: Any) -> Completion:
        completion = self._engine.run(*given, **named)
        self.reached.set()
        assert self.go_on.wait()
        return completion


@pytest.fixture
def waiting(served: Any) -> Pipeline:
    """A pipeline with a prompt that waits to be computed exactly."""
    pipeline = served(replace(EXACT, reuse="blend", semantic_text=False))
    pipeline.promotes = True
    pipeline.answer(request(wordings()[0]))
    assert pipeline.answer(request(wordings()[0], MIXED)).record.method == "blend"
    return pipeline


def during(pipeline: Pipeline, errand: Callable[[], object], removing: Callable[[], object]) -> None:
    """Removes while the errand is computing. The removal may end before the errand does, or wait for it."""
    engine = pipeline.engine = Held(pipeline.engine)
    idle = threading.Thread(target=errand)
    idle.start()
    assert engine.reached.wait()
    began = threading.Event()
    queue = pipeline.cache.queue
    removing_ = queue.begin_removal

    def noting(partition: str | None) -> None:
        removing_(partition)
        began.set()

    queue.begin_removal = noting
    remover = threading.Thread(target=removing)
    remover.start()
    assert began.wait()
    remover.join(0.5)
    engine.go_on.set()
    remover.join()
    idle.join()
    assert not remover.is_alive()
    assert not idle.is_alive()


@pytest.mark.parametrize("selection", [Selection(), Selection("default"), Selection(older_than=0)])
def test_a_promotion_does_not_bring_a_purged_prompt_back(waiting: Pipeline, selection: Selection) -> None:
    cache: Any = waiting.cache
    for purge in (waiting.purge, cache.purge):
        during(waiting, waiting.promote_one, lambda purge=purge: purge(selection))
        assert list(cache.store.metas()) == []
        waiting.answer(request(wordings()[0]))
        assert waiting.answer(request(wordings()[0], MIXED)).record.method == "blend"


def test_another_partitions_purge_leaves_it_alone(waiting: Pipeline) -> None:
    cache: Any = waiting.cache
    before = len(list(cache.store.metas()))
    during(waiting, waiting.promote_one, lambda: cache.purge(Selection("somebody else")))
    assert len(list(cache.store.metas())) > before


def test_a_label_does_not_either_and_is_lost(served: Any) -> None:
    pipeline = served(BOUNDED)
    taught(pipeline)
    stream = hits()
    for _ in range(PILOT + 1):
        sampled = Sampling(4, temperature=1.0)  # so that full computation is a run of its own
        pipeline.answer(replace(next(stream), sampling=sampled))
    assert pipeline.cache.queue.counts.labels
    during(pipeline, pipeline.label_one, lambda: pipeline.purge(Selection("default")))
    assert list(pipeline.cache.store.metas()) == []
    report = pipeline.cache.trust("default")
    assert report.explored == 0
    assert report.lost >= 1
