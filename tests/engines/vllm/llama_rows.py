"""What blends are held to: a forward over chosen rows, written out layer by layer for models that are built like Llama.

It was the connector's own before vLLM's forward took its place. It uses vLLM's modules for everything but attention, which sees all
of the prompt's K and V in one tensor.
"""

from typing import Any

import torch
import torch.nn.functional as F

from dejakv.blend.offsets import correct, corrections
from dejakv.engines.vllm.blend.drafts import Draft


@torch.inference_mode()
def computed_rows(model: Any, draft: Draft, rows: torch.Tensor) -> torch.Tensor:
    """The draft's state with the rows computed in every layer and the others moved: `[2, layers, kv_heads, n, head_dim]`."""
    decoder, state = Decoder(model), draft.state.clone()
    made = corrections(draft.plan.runs, rows, draft.plan.changed) if draft.plan.runs is not None else []
    hidden, residual = decoder.embed(draft.ids[rows]), None
    for index in range(len(decoder.layers)):
        keys, values = state[0, index], state[1, index]
        normed, residual = decoder.normed(index, hidden, residual)
        q, k, v = decoder.project(index, normed)
        q, k = decoder.rotate(index, rows, q, k)
        fresh_keys = k.view(len(rows), *keys.shape[::2]).transpose(0, 1)
        fresh_values = v.reshape(len(rows), *values.shape[::2]).transpose(0, 1)
        if index:
            correct(keys[None], fresh_keys[None], made)
            correct(values[None], fresh_values[None], made)
        keys[:, rows], values[:, rows] = fresh_keys, fresh_values
        mixed = decoder.attend(index, rows, q, keys, values)
        hidden, residual = decoder.feed(index, mixed, residual)
    return state


class Decoder:
    """The model's layers, one call each. Hidden states are `[rows, hidden]`, K and V `[kv_heads, tokens, head_dim]`."""

    def __init__(self, model: Any) -> None:
        self._decoder = model.model
        self.layers = list(model.model.layers)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._decoder.embed_input_ids(ids)

    def normed(
        self, index: int, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's input after its first norm, and the residual stream."""
        layer = self.layers[index]
        if residual is None:
            return layer.input_layernorm(hidden), hidden
        return layer.input_layernorm(hidden, residual)

    def project(self, index: int, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k (not rotated) and v, `[rows, size]`."""
        attention = self.layers[index].self_attn
        made, _ = attention.qkv_proj(normed)
        return made.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)

    def rotate(
        self, index: int, rows: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers[index].self_attn.rotary_emb(rows, q.contiguous(), k.contiguous())

    def attend(
        self, index: int, rows: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Attention of the rows to all tokens up to themselves, projected: `[rows, hidden]`."""
        attention = self.layers[index].self_attn
        queries = q.view(len(rows), -1, keys.shape[-1]).transpose(0, 1)
        parts = max(1, min(8, len(rows) // 64))  # early rows need not be multiplied with late keys
        ends = [int(part[-1]) + 1 for part in rows.tensor_split(parts)]
        out = [
            self._seen(part, mine, keys[:, :end], values[:, :end], attention.scaling)
            for part, mine, end in zip(rows.tensor_split(parts), queries.tensor_split(parts, dim=1), ends, strict=True)
        ]
        return attention.o_proj(torch.cat(out, dim=1).transpose(0, 1).reshape(len(rows), -1))[0]

    @staticmethod
    def _seen(
        rows: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        seen = torch.arange(keys.shape[1], device=rows.device)[None] <= rows[:, None]
        return F.scaled_dot_product_attention(
            queries[None],
            keys[None].to(queries.dtype),
            values[None].to(queries.dtype),
            attn_mask=seen,
            scale=scale,
            enable_gqa=True,
        )[0]

    def feed(self, index: int, mixed: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[index]
        normed, residual = layer.post_attention_layernorm(mixed, residual)
        return layer.mlp(normed), residual
