"""Blends of two engines over the same prompts: the connector computes the rows that the transformers engine computes, and the same state."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.documents import COSTS
from vllm_harness import tokens, worker_side

from dejakv.build import build_cache
from dejakv.config import SemanticCacheConfig
from dejakv.engines.vllm.identity import partition_of
from dejakv.experiments.vllm_engine import VLLMEngine, connector_settings
from dejakv.pipeline import Answer, Pipeline
from dejakv.request import DEFAULT_PARTITION, Request, Sampling
from dejakv.store.base import ROWS, StoredState
from dejakv.store.store import Store

CONFIG = SemanticCacheConfig(reuse="blend", index_encoder="model", min_gain=0, min_gain_share=0.0, costs=COSTS)


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    """It computes the last four tokens of a blended prompt by itself, which are the question's, and few rows a step."""
    settings = replace(connector_settings(CONFIG), blend_tail=4)
    made = VLLMEngine.from_pretrained(
        "docs-lm", settings=settings, max_num_batched_tokens=168, enable_chunked_prefill=True
    )
    yield made
    made.close()


def asked(number: int, *parts: str) -> Request:
    return Request(f"r{number}", f"<s> {' '.join(parts)} <q> Where does Bob live ? <a>", "", sampling=Sampling(2))


def kept(store: Store, partition: str = DEFAULT_PARTITION) -> dict[tuple[int, int], StoredState]:
    """What is stored of blended prompts, by generation and position."""
    metas = [meta for meta in store.metas(partition) if meta.kind == ROWS]
    return {(meta.generation, meta.position): store.get(meta.id) for meta in metas}


def computed(answer: Answer) -> int:
    """Rows of the prompt. The transformers engine counts the question's own pass too."""
    report = answer.completion.details.get("blend") if answer.record.method == "blend" else None
    return answer.record.computed_tokens if report is None or report.active is None else len(report.active)


@pytest.mark.parametrize(
    ("settings", "new_words"),
    [
        ({"blend_selector": "similarity", "blend_share": 0.1}, 80),
        ({"blend_selector": "similarity", "blend_share": 0.35}, 80),
        ({"blend_selector": "prophet", "blend_share": 0.35}, 80),
        ({"blend_selector": "prophet", "blend_map": "lsh"}, 50),  # the last prompt has too little in common there
    ],
)
def test_rows_and_state_are_those_of_the_transformers_engine(
    settings: dict[str, Any], new_words: int, engine: VLLMEngine, docs_engine: Any, request: pytest.FixtureRequest
) -> None:
    """A blend, and one that takes the new text of it, each behind moved state of two donors. Two arms of vLLM have each their own."""
    decode, seed = engine._llm.get_tokenizer().decode, 1000 * request.node.callspec.indices["settings"]

    def words(number: int, count: int) -> str:
        """Sentences of random words, so that no two texts have runs in common."""
        return " ".join(f"{decode(tokens(9, seed + 100 * number + line))} ." for line in range(count // 10))

    first, second, new, newer = (words(place, count) for place, count in enumerate((240, 160, new_words, new_words)))
    config, arms = replace(CONFIG, **settings), [f"{name}-{seed}" for name in ("one", "other")]
    engines = [docs_engine, *(engine.for_arm("cache", name) for name in arms)]
    pipelines = [Pipeline(each, build_cache(config, each, background=False)) for each in engines]
    prompts = [asked(1, first), asked(2, second), asked(3, second, new, first)]
    prompts.append(asked(4, new, first[400:], newer, second[200:]))
    answers = [[pipeline.answer(prompt) for pipeline in pipelines] for prompt in prompts]
    told = [[(one.record.method, computed(one), one.record.reason, one.token_ids) for one in each] for each in answers]
    for theirs, *ours in told:
        assert ours == [theirs] * 2
    assert told[2][0][0] == "blend"
    wanted = kept(pipelines[0].cache.store)
    assert wanted
    for name in arms:
        got = kept(worker_side().store, partition_of(f"{name}:{DEFAULT_PARTITION}"))
        assert got.keys() == wanted.keys()
        for place, stored_state in wanted.items():
            assert got[place].meta.token_ids == stored_state.meta.token_ids
            there, here = stored_state.tensor.data, got[place].tensor.data
            assert np.abs(there - here).max() < 1e-4 * np.abs(there).max()
    if new_words == 80:
        assert [generation for generation, _ in wanted] == [1, 2]
        (donors,) = {len(one.completion.details["vllm"]["donors"]) for one in answers[3][1:]}
        assert donors == 3
    for pipeline in pipelines:
        pipeline.cache.close()
