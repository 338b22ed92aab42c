"""A prefix that makes a request slower is not used; which ones do is arithmetic over the model's shape."""

from dataclasses import replace

from transformers import LlamaConfig, LlamaForCausalLM

from dejakv.build import build_cache
from dejakv.config import SemanticCacheConfig
from dejakv.datasets.docs import prompt_of
from dejakv.engines.base import KnowsPrefixCost
from dejakv.engines.transformers.prefix_cost import PrefixCost
from dejakv.pipeline import Pipeline
from dejakv.request import Request, Sampling

SMOLLM2 = PrefixCost(row=2 * 106_000_000, pair=4 * 30 * 576)


def test_a_small_part_of_a_long_prompt_does_not_pay() -> None:
    assert [SMOLLM2.pays(held, 1300) for held in (16, 40, 162, 325, 1299)] == [False, False, False, True, True]
    assert SMOLLM2.pays(64, 600)
    assert not SMOLLM2.pays(0, 600)


def test_the_cost_is_that_of_the_shape() -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=50,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    layer = 32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 64 + 2 * 32
    assert PrefixCost.of(model, "sdpa") == PrefixCost(row=2 * 3 * layer, pair=4 * 3 * 64)


def test_every_prefix_pays_where_whole_prompts_have_a_mask_too() -> None:
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=50))
    assert PrefixCost.of(model, "eager").pays(1, 10_000)


def test_a_request_is_computed_in_full_where_that_is_faster(docs_engine) -> None:
    """The documents model is narrow, so attention is most of its work: a few held tokens of many do not pay."""
    assert isinstance(docs_engine, KnowsPrefixCost)
    words = [f"fact {number} is here." for number in range(200)]
    first, second = (prompt_of(" ".join(["Ann lives in Paris.", *order]), "Where?") for order in (words, words[::-1]))
    with_cache = Pipeline(docs_engine, build_cache(SemanticCacheConfig(index_encoder="model"), docs_engine))
    try:
        records = []
        for prompt in (first, second, first):
            request = Request("r", prompt, prompt, sampling=Sampling(1))
            records.append(with_cache.answer(request).record)
            with_cache.cache.flush()
    finally:
        with_cache.cache.close()
    held = [replace(record, request_id="").method for record in records]
    assert held == ["none", "none", "exact"]
    assert records[1].computed_tokens == records[1].prompt_tokens
    assert records[1].statuses["kv_cache"] == "miss"
