"""A layer-by-layer forward over chosen rows, for decoders built like Llama's (Llama, Mistral, Qwen2 and relatives).

It uses vLLM's own modules for everything but attention, which sees all of the prompt's K and V in one tensor.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F

from dejakv.reuse.rope import turn

_LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_ATTENTION = ("qkv_proj", "o_proj", "rotary_emb", "q_size", "kv_size", "scaling")
_FOREIGN = ("q_norm", "k_norm", "sinks", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def why_not(model: Any) -> str:
    """Why this model is not built like Llama, empty if it is."""
    decoder = getattr(model, "model", None)
    if decoder is None or not hasattr(decoder, "layers") or not hasattr(decoder, "embed_input_ids"):
        return f"{type(model).__name__} is not built like Llama: it has no model.layers"
    for layer in decoder.layers:
        missing = [name for name in _LAYER if not hasattr(layer, name)]
        missing += [name for name in _ATTENTION if not hasattr(getattr(layer, "self_attn", None), name)]
        foreign = [
            name for name in _FOREIGN if hasattr(layer, name) or hasattr(getattr(layer, "self_attn", None), name)
        ]
        if missing or foreign:
            return f"{type(model).__name__} is not built like Llama: its layers " + (
                f"lack {', '.join(missing)}" if missing else f"have {', '.join(foreign)}"
            )
        if getattr(layer.self_attn, "do_llama_4_scaling", False):
            return f"{type(model).__name__} scales queries by their position (llama_4_scaling)"
        if not hasattr(layer.self_attn.rotary_emb, "cos_sin_cache"):
            return f"{type(model).__name__} rotates keys in a way that is not known here"
    return ""


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

    def weights(self, index: int, rows: torch.Tensor, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """How much the rows attend to each token up to themselves, summed over heads and rows: `[tokens]` float32."""
        queries = q.view(len(rows), keys.shape[0], -1, keys.shape[-1]).float()
        scores = torch.einsum("rhgd,hkd->hgrk", queries, keys.float()) * self.layers[index].self_attn.scaling
        later = torch.arange(keys.shape[1], device=rows.device)[None] > rows[:, None]
        return scores.masked_fill(later, -math.inf).softmax(-1).sum((0, 1, 2))

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

    def move(self, keys: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Turns all layers' cached keys `[layers, kv_heads, n, head_dim]` of positions `source` to positions `target`, in
        place. What does not move stays bit for bit."""
        rows = (source != target).nonzero().squeeze(1)
        if not len(rows):
            return
        source, target = source[rows], target[rows]
        tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # most models have one rotary module for all layers
        for layer, mine in zip(self.layers, keys, strict=True):
            rotary = layer.self_attn.rotary_emb
            if id(rotary) not in tables:
                tables[id(rotary)] = self._turn(rotary, source, target)
            mine[:, rows] = self._turned(rotary.is_neox_style, mine[:, rows], *tables[id(rotary)])

    @staticmethod
    def _turn(rotary: Any, source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = rotary.cos_sin_cache.float()
        half = table.shape[-1] // 2
        there, here = table[target], table[source]
        return turn((there[:, :half], there[:, half:]), (here[:, :half], here[:, half:]))

    @staticmethod
    def _turned(halves: bool, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`halves`: a number and its partner lie half a head apart, else side by side."""
        width = 2 * cos.shape[-1]
        wide = keys[..., :width].float()
        one, other = wide.chunk(2, dim=-1) if halves else (wide[..., 0::2], wide[..., 1::2])
        pair = (one * cos - other * sin, other * cos + one * sin)
        turned = torch.cat(pair, dim=-1) if halves else torch.stack(pair, dim=-1).flatten(-2)
        return torch.cat([turned.to(keys.dtype), keys[..., width:]], dim=-1)
