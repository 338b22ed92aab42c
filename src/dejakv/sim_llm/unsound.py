"""The same reuse on an ordinary model, for study alone: the prompt skips every layer but the last.

The last layer holds the donor's keys and values, the layers below hold nothing of the prompt but the computed tail. Layers
of unequal length can only be continued one token at a time.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

LABEL = "[unsound reuse] "
"""Stands before every text that an ordinary model made from another task's top layer."""


def top_layer_kv(cache: Cache, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [1, kv heads, tokens, dim] of the last layer, as a miss computed them."""
    top: Any = cache.layers[-1]
    return top.keys[0, None, :, :tokens].clone(), top.values[0, None, :, :tokens].clone()


@torch.no_grad()
def generate_unsound(
    model: Any, token_ids: tuple[int, ...], kv: tuple[torch.Tensor, torch.Tensor], tail: int, max_new_tokens: int
) -> list[int]:
    """Greedy tokens. Row i takes the donor's row i; the last `tail` rows run through all layers, each seeing there only those
    before it. Stops at an end token."""
    n = len(token_ids)
    first = max(0, min(n - tail, kv[0].shape[2]))
    cache = DynamicCache()
    empty = kv[0][:, :, :0]
    for layer in range(model.config.num_hidden_layers - 1):
        cache.update(empty, empty, layer)
    cache.update(kv[0][:, :, :first], kv[1][:, :, :first], model.config.num_hidden_layers - 1)
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    said: list[int] = []
    pending = list(token_ids[first:])
    position = first
    while True:
        logits: Any = None
        for token in pending:
            logits = model(
                torch.tensor([[token]], device=model.device),
                past_key_values=cache,
                position_ids=torch.tensor([[position]], device=model.device),
                use_cache=True,
            ).logits
            position += 1
        said.append(int(logits[0, -1].argmax()))
        if said[-1] in ends or len(said) >= max_new_tokens:
            return said
        pending = said[-1:]
