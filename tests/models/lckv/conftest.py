"""Small random LCKV models."""

import pytest
import torch

from dejakv.models.cache_name import CACHE_NAME
from dejakv.prototypes.lckv.cache import LCKVCache
from dejakv.prototypes.lckv.configuration import LCKVLlamaConfig
from dejakv.prototypes.lckv.modeling import LCKVLlamaForCausalLM


def tiny(layout: str, **settings) -> LCKVLlamaForCausalLM:
    """Five layers of 32, 50 tokens, unless the settings say otherwise."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None}
    given = {**shape, **heads, "initializer_range": 0.1, **settings}
    config = LCKVLlamaConfig(**given, kv_layout=layout)
    return LCKVLlamaForCausalLM(config).eval()


@torch.no_grad()
def sequential_prefill(model: LCKVLlamaForCausalLM, input_ids: torch.Tensor) -> tuple[torch.Tensor, LCKVCache]:
    """Logits [batch, tokens, vocabulary] and the cache of a prompt computed token by token: exact, and slow."""
    cache = LCKVCache(model.model.layout)
    parts = [model(token, **{CACHE_NAME: cache}, use_cache=True).logits for token in input_ids.split(1, 1)]
    return torch.cat(parts, 1), cache


@pytest.fixture(params=["0_3_3_3_4", "0_1_4_4_4", "3_3_3_3_4", "0_2_2_4_4", "0_1_3_3_4"])
def model(request):
    return tiny(request.param)


@pytest.fixture
def ids():
    return torch.randint(1, 50, (2, 24), generator=torch.Generator().manual_seed(1))
