"""Top-layer reuse on an ordinary model, for study alone: the prompt skips every layer but the last.

The last layer holds the donor's keys and values, the layers below hold nothing of the prompt but the computed tail. Layers
of unequal length can only be continued one token at a time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from dejakv.engines.transformers.kv import filled_layer


class TopOnlyCache(DynamicCache):
    """Layers of unequal length. `tokens`: those of the prompt and the answer so far, which `generate` is told."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        if layer_idx == 0:
            self.tokens += key_states.shape[-2]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens


def taken_of(tokens: int, donor: int, tail: int) -> int:
    """How many rows from the beginning a prompt takes from a donor, each the one of its own place."""
    return max(0, min(tokens - tail, donor))


@torch.inference_mode()
def filled_below(
    model: Any, token_ids: Sequence[int], kv: tuple[torch.Tensor, torch.Tensor], first: int
) -> TopOnlyCache:
    """A cache of all tokens but the last. The top layer's rows before `first` are the donor's `kv` `[1, heads, tokens, dim]`; the
    others run through all layers, each seeing there only those before it."""
    cache = TopOnlyCache(first)
    layers: list[Any] = [
        filled_layer(kv[0][:, :, :0], kv[1][:, :, :0]) for _ in range(model.config.num_hidden_layers - 1)
    ]
    cache.layers = [*layers, filled_layer(kv[0][:, :, :first], kv[1][:, :, :first])]
    for place in range(first, len(token_ids) - 1):
        model(
            torch.tensor([[token_ids[place]]], device=model.device),
            past_key_values=cache,
            position_ids=torch.tensor([[place]], device=model.device),
            use_cache=True,
        )
    return cache


def top_layer_kv(cache: Cache, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [1, kv heads, tokens, dim] of the last layer, as a miss computed them."""
    top: Any = cache.layers[-1]
    return top.keys[0, None, :, :tokens].clone(), top.values[0, None, :, :tokens].clone()
