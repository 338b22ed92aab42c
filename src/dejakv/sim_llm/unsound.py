"""Top-layer reuse on an ordinary model, for study alone: the prompt skips every layer but the last, which holds the donor's rows."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from dejakv.engines.transformers.kv import filled_layer


class TopOnlyCache(DynamicCache):
    """Layers of unequal length. `tokens`: those of the prompt and the answer so far, which `generate` is told."""

    tokens = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        if layer_idx == 0:
            self.tokens += key_states.shape[-2]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens


def filled_below(model: Any, ids: Sequence[int], kv: tuple[torch.Tensor, torch.Tensor], first: int) -> TopOnlyCache:
    """A cache of all tokens but the last. The top layer's rows before `first` are the donor's `kv` `[1, heads, tokens, dim]`; the
    others run through all layers one by one, as layers of unequal length ask for, and see there only those before them."""
    cache = TopOnlyCache()
    ends = [0] * (model.config.num_hidden_layers - 1) + [first]
    layers: list[Any] = [filled_layer(kv[0][:, :, :end], kv[1][:, :, :end]) for end in ends]
    cache.layers = layers
    cache.tokens = first
    for place in range(first, len(ids) - 1):
        token, at = torch.tensor([[ids[place]], [place]], device=model.device).split(1)
        model(token, past_key_values=cache, position_ids=at, use_cache=True)
    return cache
