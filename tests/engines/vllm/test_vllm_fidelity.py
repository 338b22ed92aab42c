"""`Completion.continued` on vLLM: what the model would say along given tokens, beside the transformers engine's."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllm_facts import BLENDING, CONFIG, blended, changed, donor_of, request
from vllm_harness import DOCS, worker_side

from dejakv.engines.transformers.engine import TransformersEngine
from dejakv.engines.vllm import compat
from dejakv.engines.vllm.engine import VLLMEngine
from dejakv.engines.vllm.keys import partition_of
from dejakv.experiments.fidelity import fidelity
from dejakv.request import Request
from dejakv.reuse.blend import BlendConfig


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    made = VLLMEngine.from_pretrained("docs-lm", settings=BLENDING)
    yield made
    made.close()


def close(one: Any, other: Any) -> None:
    assert one is not None
    assert other is not None
    np.testing.assert_allclose(np.exp(one), np.exp(other), atol=1e-4)


def test_rows_along_the_own_answer_are_the_transformers_engines(engine: VLLMEngine) -> None:
    plain = TransformersEngine.from_pretrained(str(DOCS), dtype="fp32")
    for arm in ("none", "prefix"):
        there, here = plain.for_arm("none"), engine.for_arm(arm)
        want = there.run(there.prepare(request(1)))
        for _ in range(2):  # in full, and from the prefix cache
            got = here.run(here.prepare(request(1)))
            assert got.token_ids == want.token_ids
            close(got.continued(got.token_ids), want.continued(want.token_ids))
    assert got.computed_tokens < got.prompt_tokens


def test_rows_along_another_answer_are_those_of_a_repetition(engine: VLLMEngine) -> None:
    plain = TransformersEngine.from_pretrained(str(DOCS), dtype="fp32").for_arm("none")
    want = plain.run(plain.prepare(request(2)))
    other = (want.token_ids[0], *((token + 1) % 400 + 8 for token in range(40)))
    for arm in ("none", "prefix", "cache"):
        here = engine.for_arm(arm)
        got = here.run(here.prepare(request(2)))
        close(got.continued(other), want.continued(other))
        close(got.continued(want.token_ids), want.continued(want.token_ids))  # the own answer's rows are still there


def test_a_blend_is_as_near_as_the_transformers_engines(engine: VLLMEngine) -> None:
    plain = TransformersEngine.from_pretrained(str(DOCS), dtype="fp32").for_arm("none")
    cached = engine.for_arm("cache")
    full = plain.run(plain.prepare(changed(3)))
    chunk = donor_of(cached, request(3))
    # which rows are computed by whom changes what they show of the others, and what the question's pass ranks highest
    plainly = replace(CONFIG, offsets=False, selector="similarity")
    near = fidelity(full.continued(full.token_ids), blended(cached, 3, chunk, plainly).continued(full.token_ids))
    there = fidelity(full.continued(full.token_ids), blended(plain, 3, chunk, plainly).continued(full.token_ids))
    assert near is not None
    assert there is not None
    assert near.kl == pytest.approx(there.kl, rel=0.2)  # vLLM computes the last rows in every layer
    assert near.kl > 0.01
    assert near.top1 == there.top1


def test_no_rows_of_nothing(engine: VLLMEngine) -> None:
    here = engine.for_arm("prefix")
    assert here.run(here.prepare(request(5))).continued(()) is None


def side_of(engine: VLLMEngine) -> Any:
    return compat.scheduler_of(engine._shared.llm).connector.scheduler_side


def state_of(engine: VLLMEngine) -> dict[str, Any]:
    """What a later request can find, and what is counted."""
    side, worker = side_of(engine), worker_side()
    pool = compat.scheduler_of(engine._shared.llm).kv_cache_manager.block_pool
    return {
        "counts": dict(side.counts._values),
        "stored": sorted(meta.id for meta in worker.store.metas()),
        "levels": side.lookups.cache.stats(partition_of("cache:default")),
        "encoded": engine._encoder_runs(),
        "filed": {bytes(key) for key in pool.cached_block_hash_to_block._cache},
        "free": pool.get_num_free_blocks(),
    }


def test_the_repetition_of_a_blend_is_the_same_blend_and_leaves_no_trace(engine: VLLMEngine) -> None:
    cached = engine.for_arm("cache")
    chunk = donor_of(cached, request(4))
    done = blended(cached, 4, chunk)
    before = copy.deepcopy(state_of(engine))
    other = tuple((token + 1) % 400 + 8 for token in range(40))
    along = done.continued(other)
    assert along is not None
    assert along.shape[0] == 40
    rows = cached._repeat(dict(engine_input(cached, changed(4))), done.details["vllm"], other).rows
    own = done.continued(done.token_ids)
    assert own is not None
    np.testing.assert_allclose(rows[0].log_softmax(-1).numpy(), own[0], atol=1e-4)
    assert np.array_equal(along[1:], [rows[place].log_softmax(-1).numpy() for place in range(1, 40)])
    assert state_of(engine) == before
    again = cached.run(
        cached.prepare(changed(4))
    )  # the prompt runs exactly, from its exact prefix: nothing of the blend is there
    plain = engine.for_arm("none")
    close(again.continued(other), plain.run(plain.prepare(changed(4))).continued(other))


def engine_input(engine: VLLMEngine, asked: Request) -> dict[str, Any]:
    prepared = engine.prepare(asked)
    return {**prepared.inputs, "cache_salt": engine._salt(prepared)}


def test_the_repetition_of_an_exact_run_leaves_no_trace(engine: VLLMEngine) -> None:
    """That of a prompt of fewer tokens than the connector looks at neither."""
    other = tuple((token + 1) % 400 + 8 for token in range(40))
    for arm in ("prefix", "cache"):
        here = engine.for_arm(arm)
        done = here.run(here.prepare(request(6)))
        done.capture()  # waits for the save, whose confirmation comes with a later step
        engine.for_arm("prefix").run(here.prepare(request(7)))
        before = copy.deepcopy(state_of(engine))
        assert done.continued(other) is not None
        assert state_of(engine) == before
        short = here.run(here.prepare(replace(request(9), prompt="<s> Ann lives in Rome . <q> Where ?")))
        assert short.prompt_tokens < BLENDING.min_tokens
        before = copy.deepcopy(state_of(engine))
        assert short.continued(other) is not None
        assert state_of(engine) == before


def test_a_blend_that_cannot_be_repeated_is_not_measured(engine: VLLMEngine) -> None:
    """Its donor is gone: rows from another state would be no measurement of this one."""
    cached = engine.for_arm("cache")
    chunk = donor_of(cached, request(8))
    done = blended(cached, 8, chunk)
    assert worker_side().store.delete(done.details["vllm"]["donor"])
    assert done.continued(tuple(range(9, 30))) is None
    assert done.continued(done.token_ids) is not None


def test_one_engine_blends_as_each_request_asks(engine: VLLMEngine) -> None:
    """From the same donor, whatever the engine was started with."""
    cached = engine.for_arm("cache")
    chunk = donor_of(cached, request(4))
    computed: list[int] = []
    for seed, share in ((15, 0.1), (16, 0.7), (17, 0.1)):
        config = BlendConfig(
            share=share, rule="none", selector="similarity", threshold=1e9, min_similarity=0.0, max_share=1.0
        )
        done = cached.blend(cached.prepare(request(seed)), [chunk], config)
        assert not isinstance(done, str)
        assert done.details["blend"].blended, done.details["blend"].reason
        computed.append(done.computed_tokens)
    few, many, again = computed
    assert max(few, again) < many
