"""The first blend of a process: what the check of the model takes is no cost of blends; rows are kept for any fixed rotary tables."""

import time
from functools import cached_property
from typing import Any

import pytest
from tests import tiny_models as models
from tests.tiny_models import blended, text_model, tokenizer

from dejakv.build import build_cache
from dejakv.config import SemanticCacheConfig
from dejakv.engines.base import Prepared
from dejakv.engines.transformers import TransformersEngine
from dejakv.pipeline import Pipeline
from dejakv.request import Request, Sampling
from dejakv.store.base import StateInfo, StoredState

CHECK_S = 1e6
"""What a check takes by the clock of these tests, far beyond what anything takes by a real one."""


class Clock:
    """The process's clock, put forward by each check of a model."""

    def __init__(self) -> None:
        self.checks = 0
        self._real = time.perf_counter

    def __call__(self) -> float:
        return self._real() + CHECK_S * self.checks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


def engine_of(model: Any) -> TransformersEngine:
    return TransformersEngine(model, tokenizer(), check=False)


def checked_slowly(clock: Clock) -> TransformersEngine:
    class Slow(TransformersEngine):
        @cached_property
        def blend_model(self) -> Any:
            clock.checks += 1
            return super().blend_model

    return Slow(text_model("llama"), tokenizer(), check=False)


def prepared_of(ids: list[int]) -> Prepared:
    request = Request("r", "a prompt", "a prompt", sampling=Sampling(2))
    return Prepared(request, tuple(ids))


def donor_of(engine: Any, ids: list[int]) -> StoredState:
    state = engine.full(prepared_of(ids)).capture()
    return StoredState(StateInfo("donor", "default", engine.epoch, tuple(ids), "a prompt", "a prompt"), state)


@pytest.mark.parametrize("mode", ["blend", "exact", "adopt"])
def test_a_cache_that_blends_has_the_model_checked_before_the_first_request(clock: Clock, mode: Any) -> None:
    engine = checked_slowly(clock)
    cache = build_cache(SemanticCacheConfig(reuse=mode, semantic_text=False), engine, background=False)
    Pipeline(engine, cache)
    assert clock.checks == (mode == "blend")


def test_the_costs_of_blends_are_without_the_check(clock: Clock) -> None:
    """A request may ask for a blend where the cache does not: it waits, and says so, but later plans are priced without."""
    engine = checked_slowly(clock)
    ids = [3 + 7 * place % 200 for place in range(80)]
    donor = donor_of(engine, ids)
    prompt = prepared_of([5, 9, 4, *ids, 8, 6])
    waited = [blended(engine, prompt, [donor]).ttft_s > CHECK_S for _ in range(2)]
    assert (clock.checks, waited) == (1, [True, False])
    costs = engine.costs()
    assert costs is not None
    assert costs.blending(20, len(prompt.token_ids), 60) < CHECK_S / 1e3


@pytest.mark.parametrize("name", ["llama", "llama+yarn", "gemma2", "gemma3_text", "olmo3", "gemma3_text+mixed"])
def test_rows_of_a_blend_are_kept_where_rotary_tables_are_fixed(name: str) -> None:
    own: dict[str, Any] = {}
    if name.endswith("+mixed"):
        own["rope_parameters"] = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        }
    assert kept_rows(name, **models.ARCHITECTURES[name.removesuffix("+mixed")], **own)


@pytest.mark.parametrize("name", ["llama+dynamic", "gemma3_text+dynamic"])
def test_rows_are_not_kept_where_a_table_depends_on_the_length(name: str) -> None:
    own: dict[str, Any] = dict(models.ARCHITECTURES.get(name, {}))
    if name.startswith("gemma3"):
        own = models.ARCHITECTURES["gemma3_text"] | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
            }
        }
    assert not kept_rows(name, **own)


def kept_rows(name: str, **settings: Any) -> bool:
    """Whether a blend of a model hands its recomputed rows to the store."""
    settings = {"vocab_size": len(tokenizer()), **settings}
    engine = engine_of(models.architecture_model(name.removesuffix("+mixed"), **settings))
    ids = [3 + 7 * place % 200 for place in range(80)]
    new = [11 + 5 * place % 90 for place in range(60)]
    prompt = prepared_of([*new, *ids, 8, 6])
    answer = blended(engine, prompt, [donor_of(engine, ids)])
    assert not answer.details["blend"].reason
    return answer.rows is not None and bool(answer.rows.runs)
