"""New text of blended prompts in `dejakv run --engine vllm`: kept by the connector, found by the pipeline, and named in the next blend."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.asking import COSTS
from vllm_harness import tokens, worker_side

from dejakv.build import build_cache
from dejakv.config import SemanticCacheConfig
from dejakv.experiments.vllm_engine import VLLMEngine, connector_settings
from dejakv.pipeline import Pipeline
from dejakv.request import Request, Sampling
from dejakv.store.base import ROWS

CONFIG = SemanticCacheConfig(reuse="blend", index_encoder="model", min_gain=0, costs=COSTS)


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    made = VLLMEngine.from_pretrained("docs-lm", settings=connector_settings(CONFIG))
    yield made.for_arm("cache")
    made.close()


def words(engine: VLLMEngine, seed: int, count: int) -> str:
    """Sentences of random words, so that no two texts have runs in common."""
    decode = engine._llm.get_tokenizer().decode
    return " ".join(f"{decode(tokens(9, 100 * seed + number))} ." for number in range(count // 10))


def asked(number: int, *parts: str) -> Request:
    text = f"<s> {' '.join(parts)} <q> Where does Bob live ? <a>"
    return Request(f"r{number}", text, "", sampling=Sampling(2))


def test_rows_that_the_connector_keeps_are_donors_of_the_pipelines_next_blend(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline(engine, build_cache(CONFIG, engine, background=False))
    told: list[dict[str, Any]] = []
    blend = VLLMEngine.blend

    def noted(self: VLLMEngine, *given: Any, **options: Any) -> Any:
        done = blend(self, *given, **options)
        told.append(done.details["vllm"])
        return done

    monkeypatch.setattr(VLLMEngine, "blend", noted)
    document, new, newer = words(engine, 1, 240), words(engine, 2, 80), words(engine, 3, 80)
    assert pipeline.answer(asked(1, document)).record.method == "none"
    first = pipeline.answer(asked(2, new, document)).record
    assert first.method == "blend", first.reason
    (kept,) = (meta for meta in pipeline.cache.store.metas() if meta.kind == ROWS)
    assert kept.generation == 1
    theirs = {meta.id: meta for meta in worker_side().store.metas() if meta.kind == ROWS}
    ((id, same),) = theirs.items()
    assert (same.token_ids, same.position, same.generation) == (kept.token_ids, kept.position, kept.generation)

    second = pipeline.answer(asked(3, newer, new, document)).record
    assert second.method == "blend", second.reason
    assert id in told[1]["donors"]
    assert sorted(meta.generation for meta in pipeline.cache.store.metas() if meta.kind == ROWS) == [1, 2]
    pipeline.cache.close()


def test_arms_that_blend_the_same_prompts_each_find_what_they_kept(engine: VLLMEngine) -> None:
    arms = [engine.for_arm("cache", name) for name in ("one", "other")]
    pipelines = [Pipeline(arm, build_cache(CONFIG, arm, background=False)) for arm in arms]
    document, new, newer = words(engine, 4, 240), words(engine, 5, 80), words(engine, 6, 80)
    for request in (asked(1, document), asked(2, new, document)):
        for pipeline in pipelines:
            pipeline.answer(request)
    told = [pipeline.answer(asked(3, newer, new, document)).completion.details["vllm"] for pipeline in pipelines]
    assert [len(one["donors"]) for one in told] == [2, 2]
    assert told[0]["tokens_recomputed"] == told[1]["tokens_recomputed"]
    for pipeline in pipelines:
        pipeline.cache.close()
