"""What a model would say next, token by token: for comparing runs, not for serving."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from dejakv.engines.transformers.kv import PartsLayer
from dejakv.models.lckv.cache import LCKVCache


@torch.inference_mode()
def continued(
    model: Any, cache: Cache | None, ids: torch.Tensor, place: torch.Tensor | None, tokens: Sequence[int]
) -> NDArray[np.float32] | None:
    """Log probabilities `[len(tokens), vocabulary]` float32 of the tokens of some answer, row i given the prompt and the first i
    tokens (teacher forcing). None if the cache holds no plain rows of the prompt.

    It reads the prompt's rows of `cache` and changes nothing there; the prompt's last token is computed again.

    ids    `[1, prompt]`
    place  position ids `[..., prompt]` where the model counts in its own way, else None
    """
    held = ids.shape[1] - 1
    start = copied(cache, held) if cache is not None else None
    if start is None or not tokens:
        return None
    given = torch.cat([ids[:, -1:], torch.tensor([list(tokens[:-1])], dtype=ids.dtype, device=ids.device)], dim=1)
    steps = torch.arange(len(tokens), device=ids.device)
    last = place[..., -1:] if place is not None else torch.full((1, 1), held, device=ids.device)
    output = model(input_ids=given, past_key_values=start, position_ids=last + steps, use_cache=True, return_dict=True)
    return output.logits[0].float().log_softmax(-1).cpu().numpy()


def copied(cache: Cache, tokens: int) -> Cache | None:
    """The first `tokens` rows as a cache of its own: its layers view the rows, and what is added is added beside them."""
    held: list[Any] = list(cache.layers)
    if any(
        not isinstance(layer, DynamicLayer) or layer.keys is None or layer.keys.shape[-2] < tokens for layer in held
    ):
        return None
    condensed = isinstance(cache, LCKVCache)
    own: Any = LCKVCache(cache.layout, settled=cache.settled) if condensed else DynamicCache()
    own.layers = [PartsLayer([layer.keys[:1, :, :tokens]], [layer.values[:1, :, :tokens]]) for layer in held]
    return own
