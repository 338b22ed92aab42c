"""What a model would say next, token by token, from the state that a run left: for comparing runs, not for serving."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from dejakv.models.lckv.cache import LCKVCache

Continue = Callable[[Sequence[int]], NDArray[np.float32] | None]


def continuation(model: Any, cache: Cache | None, ids: torch.Tensor, place: torch.Tensor | None) -> Continue:
    """A function of the tokens of some answer: log probabilities `[len(tokens), vocabulary]` float32, row i given the
    prompt and the first i tokens (teacher forcing).

    It reads the prompt's rows of `cache` and changes nothing there; the prompt's last token is computed again. None if the
    cache holds no plain rows of the prompt.

    ids    `[1, prompt]`
    place  position ids `[..., prompt]` where the model counts in its own way, else None
    """

    @torch.inference_mode()
    def scored(tokens: Sequence[int]) -> NDArray[np.float32] | None:
        held = ids.shape[1] - 1
        start = copied(cache, held) if cache is not None else None
        if start is None or not tokens:
            return None
        given = torch.cat([ids[:, -1:], torch.tensor([list(tokens[:-1])], dtype=ids.dtype, device=ids.device)], dim=1)
        steps = torch.arange(len(tokens), device=ids.device)
        last = place[..., -1:] if place is not None else torch.full((1, 1), held, device=ids.device)
        output = model(
            input_ids=given, past_key_values=start, position_ids=last + steps, use_cache=True, return_dict=True
        )
        return output.logits[0].float().log_softmax(-1).cpu().numpy()

    return scored


def copied(cache: Cache, tokens: int) -> Cache | None:
    """The first `tokens` rows as a cache of its own: its layers view the rows, and what is added is added beside them."""
    condensed = isinstance(cache, LCKVCache)
    own_cache = LCKVCache(cache.layout, settled=cache.settled) if condensed else DynamicCache()
    layers: list[Any] = []
    for layer in cache.layers:
        held: Any = layer
        if not isinstance(layer, DynamicLayer) or held.keys is None or held.keys.shape[-2] < tokens:
            return None
        own: Any = DynamicLayer()
        own.keys, own.values = held.keys[:1, :, :tokens], held.values[:1, :, :tokens]
        own.dtype, own.device, own.is_initialized = own.keys.dtype, own.keys.device, True
        layers.append(own)
    own_cache.layers = layers
    return own_cache
