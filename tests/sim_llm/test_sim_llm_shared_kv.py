"""Prompt tokens skip layers that share KV, and nothing changes."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3nTextConfig, Gemma4TextConfig, LlamaConfig

from dejakv.errors import ModelError
from dejakv.sim_llm import SharedKVPrefill

SHAPE = {
    "vocab_size": 60,
    "vocab_size_per_layer_input": 60,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_kv_shared_layers": 3,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def gemma3n():
    own = {"altup_num_inputs": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 6}
    return Gemma3nTextConfig(**SHAPE, **own)


def gemma4():
    return Gemma4TextConfig(**SHAPE, global_head_dim=8)


@pytest.fixture(params=[gemma3n, gemma4])
def model(request):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(request.param()).eval()


@pytest.fixture
def ids():
    return torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def last(model, ids, **inputs):
    return model(ids, logits_to_keep=1, **inputs).logits


def test_the_last_logits_are_equal(model, ids):
    expected = last(model, ids)
    with SharedKVPrefill(model) as skipping:
        got = last(model, ids)
    assert torch.allclose(got, expected, atol=1e-6)
    assert skipping.skipped == 3 * 19


def test_generated_tokens_are_equal(model, ids):
    plain = model.generate(ids, max_new_tokens=8, do_sample=False)
    with SharedKVPrefill(model) as skipping:
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), plain)
    assert skipping.skipped == 3 * 19


def test_left_padding_stays_masked(model, ids):
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    expected = last(model, ids, attention_mask=mask)
    with SharedKVPrefill(model):
        assert torch.allclose(last(model, ids, attention_mask=mask), expected, atol=1e-6)


def test_a_prefill_that_wants_all_logits_skips_nothing(model, ids):
    with torch.no_grad():
        expected = model(ids).logits
        with SharedKVPrefill(model) as skipping:
            assert torch.equal(model(ids).logits, expected)
    assert skipping.skipped == 0


def test_outside_the_block_the_model_is_as_before(model, ids):
    with SharedKVPrefill(model) as skipping:
        pass
    last(model, ids)
    assert skipping.skipped == 0
    assert not model._forward_pre_hooks


def test_a_model_without_sharing_layers_is_refused():
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape, vocab_size=20))
    with pytest.raises(ModelError, match="num_kv_shared_layers"):
        SharedKVPrefill(model)
