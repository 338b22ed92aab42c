"""Prompts of unequal length in one forward, as servers compute them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def first_logs(model: Any, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Log probabilities `[prompts, vocabulary]` of each prompt's next token; shorter prompts are padded at the left."""
    longest = max(map(len, prompts))
    ids = torch.zeros((len(prompts), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode():
        out = model(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            position_ids=places.to(model.device),
            use_cache=False,
            logits_to_keep=1,
        )
    return torch.log_softmax(out.logits[:, -1].float(), -1).cpu().numpy()
