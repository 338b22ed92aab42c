"""Pruned layers of unequal length: what is kept, that decoding goes on, what it takes."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from dejakv.blend.prune import POLICIES, PrunableDynamicCache, PruneConfig, kept_rows
from dejakv.errors import ConfigError, InputError, ModelError
from dejakv.models.cache_name import CACHE_NAME

SHAPE = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def llama(attention: str = "sdpa"):
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(LlamaConfig(**SHAPE), attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


def prompt(tokens: int = 90) -> torch.Tensor:
    return torch.randint(3, 61, (1, tokens), generator=torch.Generator().manual_seed(4))


def answer(model, ids, cache, tokens: int = 5):
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, **{CACHE_NAME: cache}, **given)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_keeping_everything_changes_nothing(attention):
    model, ids = llama(attention), prompt()
    wanted = answer(model, ids, None)
    cache = PrunableDynamicCache.prefill(model, ids, PruneConfig(policy="none"))
    assert cache.nbytes == cache.full_bytes
    assert answer(model, ids, cache) == wanted


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "none"])
def test_layers_of_unequal_length_decode_as_an_explicit_mask_does(policy, attention):
    """The reference attends over all tokens with the dropped ones masked out, layer by layer."""
    model, ids = llama(attention), prompt()
    config = PruneConfig(policy=policy, keep_first=0.8, keep_last=0.2, recovery=0.9, window=8, minimum=10)
    cache = PrunableDynamicCache.prefill(model, ids, config)
    kept = cache.kept
    sizes = [rows.numel() for rows in kept]
    assert len(set(sizes)) > 1
    assert sizes[-1] < sizes[0] <= 72
    assert cache.nbytes == sum(2 * size * 2 * 8 * 4 for size in sizes) < cache.full_bytes
    with torch.inference_mode():
        got = model(input_ids=ids[:, -1:], **{CACHE_NAME: cache}, position_ids=torch.tensor([[89]])).logits[0, -1]
    with torch.inference_mode():
        plain = model(input_ids=ids[:, :-1], use_cache=True)[CACHE_NAME]
        hooks = []
        for index, layer in enumerate(model.model.layers):

            def mask(_module, args, kwargs, index=index):
                allowed = torch.zeros(1, 1, 1, 90, dtype=torch.bool)
                allowed[..., kept[index]] = True
                allowed[..., -1] = True
                chosen = torch.where(allowed, 0.0, -1e30) if attention == "eager" else allowed
                return args, {**kwargs, "attention_mask": chosen}

            hooks.append(layer.register_forward_pre_hook(mask, with_kwargs=True))
        wanted = model(input_ids=ids[:, -1:], **{CACHE_NAME: plain}, position_ids=torch.tensor([[89]])).logits[0, -1]
        for hook in hooks:
            hook.remove()
    assert (got - wanted).abs().max() < 1e-4


def test_decoding_goes_on_at_the_true_positions():
    model, ids = llama(), prompt()
    cache = PrunableDynamicCache.prefill(model, ids, PruneConfig(policy="snapkv", window=8, minimum=10))
    assert cache.get_seq_length() == 89
    answer(model, ids, cache, 4)
    assert cache.get_seq_length() == 89 + 4
    cache.layers[0].crop(-2)
    assert cache.layers[0].get_seq_length() == 91


def test_window_and_sink_are_always_kept_and_attention_keeps_what_is_attended():
    weights = torch.zeros(100)
    weights[[40, 41]] = 5.0
    config = PruneConfig(policy="attention", recovery=0.9, window=10, minimum=12, keep_first=0.5, keep_last=0.5)
    rows = kept_rows(weights, 0, 4, config).tolist()
    assert rows == [0, *rows[1:-10], *range(90, 100)]
    assert {40, 41} <= set(rows)
    assert len(rows) == 13
    assert kept_rows(weights, 0, 4, PruneConfig(policy="snapkv", minimum=20, window=4)).numel() >= 20


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match="policy='best'"):
        PruneConfig(policy="best")
    with pytest.raises(ConfigError, match="keep_last=0"):
        PruneConfig(keep_last=0)
    with pytest.raises(ConfigError, match="1 or more"):
        PruneConfig(window=0)
    model, ids = llama(), prompt()
    with pytest.raises(InputError, match="one prompt"):
        PrunableDynamicCache.prefill(model, ids.expand(2, -1))
    cache = PrunableDynamicCache.prefill(model, ids, PruneConfig(minimum=10))
    with pytest.raises(InputError, match="one token at a time"):
        model(input_ids=ids[:, :3], **{CACHE_NAME: cache})
    torch.manual_seed(0)
    windowed = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=16)).eval()
    with pytest.raises(ModelError, match="sliding windows"):
        PrunableDynamicCache.prefill(windowed, ids)
