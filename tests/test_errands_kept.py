"""What idle time keeps of a request: no longer than the request allows, counted from when it came."""

from dataclasses import replace
from typing import Any

import pytest
from tests.documents import blending, figures

from dejakv.request import Sampling, current_retention
from dejakv.store.open import open_store
from dejakv.testing.stores import AheadClock

SAMPLED = Sampling(4, temperature=1.5, seed=3)
"""Of such an answer a label computes the prompt in full again."""


class Noting:
    """An engine that notes for how long what it makes may be kept: None without a limit, 0 for not at all."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.kept: list[float | None] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prepare(self, *given: Any) -> Any:
        self._note()
        return self._engine.prepare(*given)

    def run(self, *given: Any, **named: Any) -> Any:
        self._note()
        return self._engine.run(*given, **named)

    def _note(self) -> None:
        retention = current_retention()
        self.kept.append(0 if retention.no_store else retention.ttl)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> AheadClock:
    made = AheadClock()
    for name in ("dejakv.cache.now", "dejakv.decide.queue.now", "dejakv.idle.now"):
        monkeypatch.setattr(name, made)
    return made


@pytest.mark.parametrize(("waited", "left"), [(40, 20), (61, 0)])
def test_a_label_keeps_nothing_longer_than_its_request_allows(
    served: Any, clock: AheadClock, waited: int, left: int
) -> None:
    store = open_store(clock=clock)
    pipeline, stream = blending(lambda config: served(config, store=store))
    engine = pipeline.engine = Noting(pipeline.engine)
    answer = pipeline.answer(replace(next(stream), sampling=SAMPLED, ttl=60.0))
    assert engine.kept == [60.0, 60.0]
    engine.kept.clear()
    store.delete(answer.record.key)  # it was evicted
    clock.seconds = waited
    assert pipeline.label_one()
    assert figures(pipeline) == (1, 0, 0), "it is a label all the same"
    assert engine.kept == [pytest.approx(left, abs=2)] * 2
    assert [meta.ttl for meta in store.metas() if meta.ttl] == [pytest.approx(left, abs=2)] * (left > 0)
