"""Attention weights as they happen, without an attention implementation that returns them.

A torch function mode sees each call of `scaled_dot_product_attention` (or, with eager attention, of
`softmax`) with the very queries and keys that the model uses, and computes the weights of the last
few queries. No class or function is replaced, and other threads see nothing.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class AttentionProbe(TorchFunctionMode):
    """Context that collects the attention weights of the last few queries.

    `weights[i]` is `[kv tokens]` float32, of the layer `first + i`, summed over heads and queries.
    Of a batch the first prompt counts.

    Parameters
    ----------
    queries : int
        Number of last queries whose weights are collected.
    first : int
        First layer whose weights are collected.
    """

    def __init__(self, queries: int, first: int = 0) -> None:
        super().__init__()
        self.queries = queries
        self._calls_to_skip = first
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            if self._skip_call():
                return func(*args, **kwargs)
            # Or the softmax in here would be taken for one of the model's.
            with torch._C.DisableTorchFunction():
                self.weights.append(self._weights(*args, **kwargs))
            return func(*args, **kwargs)

        result = func(*args, **kwargs)
        if func is torch.nn.functional.softmax and result.dim() == 4 and not self._skip_call():
            self.weights.append(result[0, :, -self.queries :].float().sum((0, 1)))
        return result

    def _skip_call(self) -> bool:
        """Return whether this call is of a layer before the first."""
        self._calls_to_skip -= 1
        return self._calls_to_skip >= 0

    def _weights(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        # The parameters are those of `scaled_dot_product_attention`, in its order.
        rows = min(self.queries, query.shape[2])
        last_queries = query[0, :, -rows:].float()
        keys = key[0].float()
        # Grouped queries: several query heads share one key head.
        grouped = last_queries.view(keys.shape[0], -1, rows, last_queries.shape[-1])

        scores = torch.einsum("hgrd,hkd->hgrk", grouped, keys) * (
            scale or 1 / math.sqrt(last_queries.shape[-1])
        )

        length = keys.shape[1]
        if attn_mask is not None:
            mask = attn_mask[0, :1, -rows:]
            scores = (
                scores.masked_fill(~mask, -math.inf)
                if mask.dtype == torch.bool
                else scores + mask.float()
            )
        elif is_causal:
            query_places = torch.arange(query.shape[2] - rows, query.shape[2], device=key.device)
            scores = scores.masked_fill(
                torch.arange(length, device=key.device)[None] > query_places[:, None], -math.inf
            )
        return scores.softmax(-1).sum((0, 1, 2))

    def total(self, tokens: int) -> Tensor:
        """Return the sum over layers, `[tokens]`.

        Attention sinks beyond the tokens (GPT-OSS) are cut off.
        """
        return torch.stack([weight[:tokens] for weight in self.weights]).sum(0)
