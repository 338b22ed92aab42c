"""An error bound over vLLM: shadows and audits are requests of their own, behind the one that they are of."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

import pytest
from tests.bounded import BOUNDED, hits, says, taught
from vllm_harness import worker_side

from dejakv.build import build_cache
from dejakv.engines.open import connector_settings
from dejakv.engines.vllm.engine import VLLMEngine
from dejakv.find.bound import setting_of
from dejakv.pipeline import Pipeline
from dejakv.trust.grid import PILOT

CONFIG = replace(BOUNDED, error_bound=0.9, confidence=0.5, differs=says(repeat(False)))
"""One right label opens it."""


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    made = VLLMEngine.from_pretrained("docs-lm", settings=connector_settings(CONFIG))
    yield made
    made.close()


@pytest.fixture
def pipeline(engine: VLLMEngine) -> Iterator[Any]:
    cached = engine.for_arm("cache")
    made: Any = Pipeline(cached, build_cache(CONFIG, cached, background=False))
    taught(made)
    for _ in range(PILOT):
        made.cache.gate.draw(
            partition="default", epoch=cached.epoch, method="blend", setting=setting_of("blend", CONFIG), features={}
        )
    yield made
    made.cache.close()


def stored() -> set[str]:
    side = worker_side()
    assert side.saver.flush(10.0)
    return {meta.id for meta in side.store.metas()}


def test_a_shadow_is_blended_behind_its_request_and_an_audit_computed_exactly(pipeline: Any) -> None:
    stream = hits()
    first, second = next(stream), next(stream)
    answer = pipeline.answer(first)
    assert (answer.record.method, answer.record.approximate) == ("prefix", False)
    assert answer.record.reason.startswith("error bound: ")
    before = stored()
    assert pipeline.run_errand()
    assert stored() == before
    report = pipeline.cache.trust("default")
    assert (report.explored, report.explored_wrong, report.lost, report.gate) == (1, 0, 0, "open")

    blended = pipeline.answer(second)
    assert blended.record.method == "blend"
    assert pipeline.run_errand()
    report = pipeline.cache.trust("default")
    assert (report.served, report.audited, report.wrong, report.lost) == (1, 1, 0, 0)
    again = pipeline.answer(second)
    assert again.record.method == "exact"
    plain = pipeline.engine.for_arm("none")
    assert again.token_ids == plain.run(plain.prepare(second)).token_ids


def test_kl_is_measured_where_logits_can_be_seen(engine: VLLMEngine) -> None:
    config = replace(CONFIG, differs="kl:1e-9")
    cached = engine.for_arm("cache", "kl")
    made: Any = Pipeline(cached, build_cache(config, cached, background=False))
    taught(made)
    for _ in range(PILOT):
        made.cache.gate.draw(
            partition="default", epoch=cached.epoch, method="blend", setting=setting_of("blend", config), features={}
        )
    made.answer(next(hits()))
    assert made.run_errand()
    report = made.cache.trust("default")
    assert (report.explored, report.explored_wrong) == (1, 1)
    made.cache.close()


class Leaves(Exception):
    """A client who leaves."""


def test_an_answer_that_is_stopped_leaves_nothing_running(engine: VLLMEngine) -> None:
    def leaves(_token: int, _text: str) -> None:
        raise Leaves

    plain = engine.for_arm("prefix")
    prepared = plain.prepare(next(hits()))
    with pytest.raises(Leaves):
        plain.run(prepared, on_token=leaves)
    assert not engine._shared.llm.llm_engine.has_unfinished_requests()
    assert plain.run(prepared).token_ids == engine.for_arm("none").run(prepared).token_ids
