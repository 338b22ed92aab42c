"""Pruning as a setting of runs and servers: approximate answers are labelled, stored state is whole."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.documents import COSTS, DOCUMENT, request

from dejakv.blend.prune import PruneConfig
from dejakv.build import build_cache
from dejakv.config import SemanticCacheConfig
from dejakv.engines.open import ModelChoice, open_engine
from dejakv.engines.transformers import TransformersEngine
from dejakv.errors import ConfigError
from dejakv.experiments.run import run
from dejakv.experiments.settings import settings_from
from dejakv.experiments.vllm_engine import open_vllm
from dejakv.pipeline import Pipeline
from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings

QUESTION = "Where does Ann live?"
KEPT = PruneConfig(policy="snapkv", keep_first=0.4, keep_last=0.1, window=8, minimum=16)


@pytest.fixture
def pruning() -> Iterator[TransformersEngine]:
    engine = open_engine(ModelChoice("docs-lm", dtype="fp32"), SemanticCacheConfig(prune="snapkv"))
    assert engine.pruning == PruneConfig(policy="snapkv")
    engine.pruning = KEPT
    return engine


def test_a_pruned_answer_is_labelled_and_its_stored_state_is_whole(pruning: Any, docs_engine: Any) -> None:
    asked = request(QUESTION)
    cache = build_cache(SemanticCacheConfig(index_encoder="model"), pruning, background=False)
    pipeline = Pipeline(pruning, cache)
    first = pipeline.answer(asked)
    assert first.record.approximate
    assert first.record.stored
    full = docs_engine.run(docs_engine.prepare(asked))
    (meta,) = cache.store.metas()
    kept = cache.store.get(meta.id)
    assert kept is not None
    assert kept.tensor.shape == full.capture().shape
    again = pipeline.answer(asked).record
    assert (again.method, again.approximate, again.computed_tokens) == ("exact", True, 1)
    cache.close()


def test_keeping_everything_gives_full_computations_answer(pruning: Any, docs_engine: Any) -> None:
    pruning.pruning = PruneConfig(policy="none")
    asked = request(QUESTION)
    assert pruning.run(pruning.prepare(asked)).token_ids == docs_engine.run(docs_engine.prepare(asked)).token_ids


@pytest.mark.parametrize("reuse", ["off", "exact"])
def test_a_request_for_exact_reuse_is_not_pruned(pruning: Any, docs_engine: Any, reuse: Any) -> None:
    asked = request(QUESTION, reuse=reuse)
    done = pruning.run(pruning.prepare(asked))
    assert not done.approximate
    assert done.token_ids == docs_engine.run(docs_engine.prepare(asked)).token_ids


def test_a_blend_is_pruned_too(pruning: Any) -> None:
    config = SemanticCacheConfig(reuse="blend", index_encoder="model", similarity_threshold=0.5, costs=COSTS)
    cache = build_cache(config, pruning, background=False)
    pipeline = Pipeline(pruning, cache)
    pipeline.answer(request(QUESTION))
    changed = request(QUESTION, DOCUMENT.text.replace(" a ", " one ", 1))
    done = pipeline.answer(changed)
    assert (done.record.method, done.record.approximate) == ("blend", True)
    cache.close()


def test_a_run_prunes_in_the_cache_arm_alone() -> None:
    given = {"max_samples": 4, "arms": ("none", "cache"), "model": "docs-lm", "dataset": "docs"}
    done = run(settings_from("docs", given, {"prune": "attention"}))
    for row in done.rows:
        assert row.arms["cache"].record.approximate
        assert not row.arms["none"].record.approximate
    assert any("--prune attention" in line for line in done.summary["implied"])


def test_the_server_prunes_what_allows_it(pruning: Any) -> None:
    with TestClient(create_app(ServerSettings(prune="snapkv"), pruning)) as client:
        body = {"prompt": request(QUESTION).prompt, "max_new_tokens": 2, "temperature": 0}
        assert client.post("/v1/generate", json={**body, "use_semshare": True}).json()["approximate"] is True
        assert client.post("/v1/generate", json={**body, "use_semshare": False}).json()["approximate"] is False
        assert client.post("/v1/completions", json={"prompt": body["prompt"]}).json()["dejakv"]["approximate"] is False


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="of the transformers engine"):
        open_vllm(ModelChoice("docs-lm", engine="vllm"), SemanticCacheConfig(prune="snapkv"))
    with pytest.raises(ConfigError, match="choose one of none, attention, snapkv"):
        SemanticCacheConfig(prune="best")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="set prune=none"):
        ServerSettings(prune="snapkv", allow_approximate=False)
