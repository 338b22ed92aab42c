"""On a real language model and real text (documentation of the standard library): whatever is reused, what must be exact is."""

import heapq
import inspect
import statistics
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.running import asking, begun, blended

from dejakv.blend.settings import BlendConfig
from dejakv.build import build_cache
from dejakv.config import SemanticCacheConfig
from dejakv.engines.base import Prepared
from dejakv.engines.transformers import TransformersEngine
from dejakv.pipeline import Pipeline
from dejakv.request import Request, Sampling
from dejakv.store.base import Chunk, ChunkMeta

PASSAGES = [
    inspect.getdoc(thing) or ""
    for thing in (textwrap.wrap, statistics.quantiles, heapq.merge, textwrap.shorten, heapq.nlargest)
]
QUESTION = "Which of these functions breaks a long text into lines?"
ANSWER = 16


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> TransformersEngine:
    return TransformersEngine.from_pretrained("smollm2-135m", dtype="fp32")


def request(passages: list[str], question: str = QUESTION, **sampling: int) -> Request:
    context = "\n\n".join(passages)
    prompt = f"<|im_start|>system\n{context}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return Request("r", prompt, prompt, sampling=Sampling(**{"max_new_tokens": ANSWER, **sampling}))


def chunk_of(engine: TransformersEngine, prepared: Prepared) -> Chunk:
    tensor = engine.full(prepared.sampled(Sampling(1))).capture()
    assert tensor is not None
    meta = ChunkMeta("d", "default", engine.epoch, prepared.token_ids, prepared.request.prompt, "")
    return Chunk(meta, tensor)


def first_logits(engine: TransformersEngine, prepared: Prepared, *start: Any) -> torch.Tensor:
    options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    return engine.compute(asking(prepared, **options, pad_token_id=2), *start).details["output"].logits[0][0].float()


def test_the_text_is_of_the_length_that_is_promised(engine: TransformersEngine) -> None:
    for count in (3, 4):
        assert 300 <= len(engine.prepare(request(PASSAGES[:count])).token_ids) <= 800


@pytest.mark.parametrize("beams", [1, 3])
def test_an_exact_hit_answers_what_full_prefill_answers(engine: TransformersEngine, beams: int) -> None:
    prepared = engine.prepare(request(PASSAGES[:3], num_beams=beams))
    chunk, n = chunk_of(engine, prepared), len(prepared.token_ids)
    whole = engine.run(prepared)
    hit = begun(engine, prepared, chunk, n - 1)
    assert hit.computed_tokens == 1
    assert hit.token_ids == whole.token_ids
    assert len(whole.text.split()) > 5


def test_a_prefix_hit_answers_what_full_prefill_answers(engine: TransformersEngine) -> None:
    donor = engine.prepare(request(PASSAGES[:3]))
    other = engine.prepare(request([*PASSAGES[:2], PASSAGES[4]], "Name the function that merges sorted inputs."))
    pairs = zip(donor.token_ids, other.token_ids, strict=False)
    shared = next(index for index, (a, b) in enumerate(pairs) if a != b)
    assert 100 < shared < len(other.token_ids) - 30
    whole = engine.run(other)
    hit = begun(engine, other, chunk_of(engine, donor), shared)
    assert hit.computed_tokens == len(other.token_ids) - shared
    assert hit.token_ids == whole.token_ids


def test_exact_through_the_pipeline(engine: TransformersEngine) -> None:
    """Twice the same request, and one that shares its beginning: the cache's answers are those without it."""
    cache = build_cache(SemanticCacheConfig(semantic_text=False), engine)
    cached, plain = Pipeline(engine, cache), Pipeline(engine)
    first, second = request(PASSAGES[:3]), request(PASSAGES[:3], "What does n stand for?")
    methods: list[str] = []
    for asked in (first, second, first, second):
        answer = cached.answer(asked)
        cache.flush()
        methods.append(answer.record.method)
        assert answer.token_ids == plain.answer(asked).token_ids
    assert methods == ["none", "prefix", "exact", "exact"]
    cache.close()


def test_blending_with_every_row_computed_is_full_prefill(engine: TransformersEngine) -> None:
    donor = engine.prepare(request(PASSAGES[:3]))
    prepared = engine.prepare(request([PASSAGES[2], PASSAGES[0], PASSAGES[1]]))
    got = blended(engine, prepared, [chunk_of(engine, donor)], BlendConfig(share=1.0))
    assert got.details["blend"].share == 1.0
    assert got.token_ids == engine.run(prepared).token_ids


def test_blending_an_identical_donor_is_exact(engine: TransformersEngine) -> None:
    prepared = engine.prepare(request(PASSAGES[:3]))
    config = BlendConfig(selector="similarity", share=0.0, tail=1)
    got = blended(engine, prepared, [chunk_of(engine, prepared)], config)
    assert got.computed_tokens == 1
    assert got.token_ids == engine.run(prepared).token_ids


def test_blending_moved_passages_computes_a_part_and_stays_near(engine: TransformersEngine) -> None:
    """Passages in another order: fewer rows, and a first token nearer to full prefill's than another prompt's is."""
    donor = engine.prepare(request(PASSAGES[:4]))
    prepared = engine.prepare(request([PASSAGES[3], PASSAGES[0], PASSAGES[1], PASSAGES[2]], max_new_tokens=1))
    chunk = chunk_of(engine, donor)
    got = blended(engine, prepared, [chunk], BlendConfig(share=0.3))
    report = got.details["blend"]
    assert report.blended
    assert report.share < 0.8
    assert got.capture() is None
    assert got.token_ids == engine.run(prepared).token_ids


def test_bfloat16_stays_within_its_own_rounding(smollm2: Path, engine: TransformersEngine) -> None:
    """Computing in bfloat16 moves logits; a reused prefix moves them by no bit more. The weights are the same."""
    half = TransformersEngine.from_pretrained("smollm2-135m", dtype="bf16")
    assert half.epoch != engine.epoch
    prepared = half.prepare(request(PASSAGES[:3] * 4))
    assert len(prepared.token_ids) > half.piece
    chunk = chunk_of(half, prepared)
    assert chunk.tensor.dtype == "BF16"
    exact = first_logits(engine, prepared)
    full, hit = first_logits(half, prepared), first_logits(half, prepared, [chunk], len(prepared.token_ids) - 1)
    noise = (full - exact).abs().max()
    assert 0 < noise < exact.std()
    assert torch.equal(hit, full)


def test_the_state_of_a_hit_is_the_state_of_a_prefill(engine: TransformersEngine) -> None:
    prepared = engine.prepare(request(PASSAGES[:2]))
    chunk = chunk_of(engine, prepared)
    again = begun(engine, prepared.sampled(Sampling(1)), chunk, len(prepared.token_ids) - 1).capture()
    assert again is not None
    np.testing.assert_array_equal(again.data[..., :-1, :], chunk.tensor.data[..., :-1, :])
    np.testing.assert_allclose(again.data, chunk.tensor.data, atol=2e-4)
