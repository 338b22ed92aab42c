"""Attention weights as they happen, without an attention implementation that hands them out.

A torch function mode sees each call of `scaled_dot_product_attention` (or, with eager attention, of `softmax`) with the very
queries and keys the model uses, and works out the weights of the last few queries. No class or function is replaced;
other threads see nothing.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class AttentionProbe(TorchFunctionMode):
    """Within the context, collects for each attention call the weights of the last `queries` rows, summed over heads and
    those rows: `weights[i]` is `[kv tokens]` float32, of the layer `first + i`. Of a batch the first counts."""

    def __init__(self, queries: int, first: int = 0) -> None:
        super().__init__()
        self.queries = queries
        self._left = first
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            if self._passed():
                return func(*args, **kwargs)
            # Or the softmax in here would be taken for one of the model's.
            with torch._C.DisableTorchFunction():
                self.weights.append(self._weights(*args, **kwargs))
            return func(*args, **kwargs)

        result = func(*args, **kwargs)
        if func is torch.nn.functional.softmax and result.dim() == 4 and not self._passed():
            self.weights.append(result[0, :, -self.queries :].float().sum((0, 1)))
        return result

    def _passed(self) -> bool:
        """Whether this call is skipped."""
        self._left -= 1
        return self._left >= 0

    def _weights(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        rows = min(self.queries, query.shape[2])
        last_queries = query[0, :, -rows:].float()
        keys = key[0].float()
        # Grouped queries: several query heads share one key head.
        grouped = last_queries.view(keys.shape[0], -1, rows, last_queries.shape[-1])
        scores = torch.einsum("hgrd,hkd->hgrk", grouped, keys) * (scale or 1 / math.sqrt(last_queries.shape[-1]))

        length = keys.shape[1]
        if attn_mask is not None:
            mask = attn_mask[0, :1, -rows:]
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.float()
        elif is_causal:
            query_places = torch.arange(query.shape[2] - rows, query.shape[2], device=key.device)
            scores = scores.masked_fill(
                torch.arange(length, device=key.device)[None] > query_places[:, None], -math.inf
            )
        return scores.softmax(-1).sum((0, 1, 2))

    def total(self, tokens: int) -> Tensor:
        """Summed over layers, `[tokens]`. Attention sinks beyond the tokens (GPT-OSS) are cut off."""
        return torch.stack([weight[:tokens] for weight in self.weights]).sum(0)
