"""Whatever part of a prompt's state is reused, the answer is the one of an uncached run, on every architecture."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.tiny_models import (
    PLACEHOLDER,
    TEXT,
    WAYS,
    asking,
    begun,
    image_engine,
    picture,
    request,
    state_of,
    text_engine,
    tokenizer,
)

from dejakv.engines.base import Prepared, Refusal
from dejakv.engines.transformers import TransformersEngine
from dejakv.request import Sampling
from dejakv.store.base import RawTensor, StoredState

PROMPT = "what colour is the cube beside the red cone, and how many green balls are left of it?"


def stock(engine: TransformersEngine, prepared: Prepared, sampling: Sampling) -> list[int]:
    """What transformers alone answers."""
    ids = torch.tensor([prepared.token_ids])
    options: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "num_beams": sampling.num_beams}
    if not sampling.greedy:
        options |= {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
        torch.manual_seed(sampling.seed or 0)
    return engine.model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=1, **options)[
        0, ids.shape[1] :
    ].tolist()


def logits(
    engine: TransformersEngine, prepared: Prepared, start: tuple[list[StoredState], int] | tuple[()]
) -> torch.Tensor:
    options = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False, "pad_token_id": 1}
    done = engine.compute(asking(prepared, max_new_tokens=2, **options), *start)
    return torch.cat(done.details["output"].logits)


@pytest.mark.shows("exact")
@pytest.mark.parametrize("name", TEXT)
def test_reused_prefix_gives_the_uncached_logits(name: str) -> None:
    engine = text_engine(name)
    prepared = engine.prepare(request(PROMPT))
    whole = engine.run(prepared)
    stored_state = state_of(engine, prepared, whole)
    n = len(prepared.token_ids)
    expected = logits(engine, prepared, ())
    for tokens in (1, 5, 8, n // 2, n - 2, n - 1):
        got = logits(engine, prepared, ([stored_state], tokens))
        assert (got - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))
        run = begun(engine, prepared, stored_state, tokens)
        assert run.computed_tokens == n - tokens
        assert run.token_ids == whole.token_ids


@pytest.mark.parametrize("sampling", WAYS, ids=lambda way: f"beams{way.num_beams}-temperature{way.temperature}")
@pytest.mark.parametrize("name", TEXT)
def test_answers_equal_those_of_transformers(name: str, sampling: Sampling) -> None:
    engine = text_engine(name)
    prepared = engine.prepare(replace(request(PROMPT), sampling=sampling))
    whole = engine.run(prepared)
    assert list(whole.token_ids) == stock(engine, prepared, sampling)
    stored_state = state_of(engine, prepared, whole)
    for tokens in (4, len(prepared.token_ids) - 1):
        assert begun(engine, prepared, stored_state, tokens).token_ids == whole.token_ids


@pytest.mark.shows("exact", model="llama")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_reuses_whole_prefill_units_and_gives_the_same_bits(dtype: torch.dtype) -> None:
    engine = text_engine("llama", dtype)
    prepared = engine.prepare(request(" ".join([PROMPT] * 12)))
    n, unit = len(prepared.token_ids), engine.prefill_unit
    assert unit < n < 2 * unit
    stored_state = state_of(engine, prepared, engine.run(prepared))
    expected = logits(engine, prepared, ())
    for tokens, taken in ((unit - 1, 0), (unit, unit), (n - 1, unit)):
        assert torch.equal(logits(engine, prepared, ([stored_state], tokens)), expected)
        assert begun(engine, prepared, stored_state, tokens).computed_tokens == n - taken


def test_state_of_another_model_is_refused() -> None:
    one, other = text_engine("llama"), text_engine("mistral")
    prepared = one.prepare(request(PROMPT))
    stored_state = state_of(one, prepared, one.run(prepared))
    refused = begun(other, prepared, stored_state, 3)
    assert isinstance(refused, Refusal)
    assert "another model" in refused.reason
    long = one.prepare(request(" ".join([PROMPT] * 12)))
    blank = state_of(one, long, one.run(long))
    blank = replace(blank, meta=replace(blank.meta, epoch=""))
    half = text_engine("llama", torch.bfloat16)
    refused = begun(half, long, blank, half.prefill_unit)
    assert isinstance(refused, Refusal)
    assert "dtype" in refused.reason
    cut = replace(blank, tensor=RawTensor(stored_state.tensor.data[0], "F32"))
    refused = begun(one, prepared, cut, 3)
    assert isinstance(refused, Refusal)
    assert "stored by something else" in refused.reason


def test_sampling_leaves_the_process_generator_alone() -> None:
    engine = text_engine("llama")
    prepared = engine.prepare(request(PROMPT))
    way = Sampling(max_new_tokens=8, temperature=1.3, seed=11)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = engine.full(prepared.sampled(way))
    assert torch.equal(torch.rand(3), expected)
    assert engine.full(prepared.sampled(way)).token_ids == first.token_ids
    seeds = {engine.full(prepared.sampled(replace(way, seed=seed))).token_ids for seed in range(4)}
    assert len(seeds) > 1


def test_pieces_of_a_character_are_held_back_until_it_is_whole() -> None:
    from dejakv.engines.transformers.decoding import TextDetokenizer

    words = tokenizer()
    text = "é is ü, 日本 yes"
    pieces = TextDetokenizer(words)
    given = [pieces.add(token) for token in words(text)["input_ids"]]
    assert "".join(given) == text
    assert "" in given
    assert not any("�" in piece for piece in given)


def test_pictures_are_kept_out_of_text_only_state() -> None:
    """A text prompt after a picture prompt has plain positions (M-RoPE remembers an offset between requests)."""
    engine = image_engine("qwen2_5_vl")
    text = engine.prepare(request(PROMPT))
    before = engine.run(text)
    engine.run(engine.prepare(request(PLACEHOLDER["qwen2_5_vl"] + " what", (picture(1, 40, 24),))))
    stored_state = state_of(engine, text, before)
    assert begun(engine, text, stored_state, 6).token_ids == before.token_ids
