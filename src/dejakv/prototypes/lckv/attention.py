"""Attention to the KV of another layer: which keys a row may see, and the decoder layer.

Parameter names are those of a Llama.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, rotate_half

from dejakv.prototypes.lckv.cache import KV
from dejakv.prototypes.lckv.configuration import LCKVLlamaConfig


@dataclass(frozen=True)
class RowMasks:
    """Keys that each row may see.

    Attributes
    ----------
    causal : Tensor, shape [batch, 1, rows, keys]
        True where a row sees a key.
    places : Tensor, shape [batch, 1, rows, 1]
        Index of the row's own key.
    """

    causal: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(
        cls,
        attention_mask: torch.Tensor | None,
        batch: int,
        past: int,
        tokens: int,
        device: torch.device,
    ) -> "RowMasks":
        """Make the masks of all rows of `tokens` new tokens behind `past` cached ones.

        Parameters
        ----------
        attention_mask : Tensor or None
            None; or [batch, past + tokens], where 0 is padding; or [batch, 1, tokens, past +
            tokens] of booleans, which replaces causality.
        batch, past, tokens : int
            Sizes.
        device : torch.device
            Device of the masks.

        Raises
        ------
        ValueError
            If the mask has another shape.
        """
        places = torch.arange(past, past + tokens, device=device)[None, None, :, None].expand(
            batch, 1, tokens, 1
        )
        keys = torch.arange(past + tokens, device=device)
        if attention_mask is None:
            return cls(keys <= places, places)
        shape = tuple(attention_mask.shape)
        if shape == (batch, past + tokens):
            return cls(
                (keys <= places) & attention_mask.to(device).bool()[:, None, None, :], places
            )

        if (
            len(shape) == 4
            and shape[-2:] == (tokens, past + tokens)
            and attention_mask.dtype == torch.bool
        ):
            return cls(attention_mask.expand(batch, -1, -1, -1), places)

        raise ValueError(
            f"attention_mask of shape {shape} and {attention_mask.dtype} does not fit a batch of "
            f"{batch} with {past} tokens held "
            f"and {tokens} new: give [{batch}, {past + tokens}], or booleans [{batch}, 1, "
            f"{tokens}, {past + tokens}]"
        )

    def pick(self, rows: torch.Tensor) -> "RowMasks":
        """Return the masks of the rows [batch, r] alone, counted among the new tokens."""
        index = rows[:, None, :, None]
        return RowMasks(
            self.causal.gather(2, index.expand(-1, 1, -1, self.causal.shape[-1])),
            self.places.gather(2, index),
        )

    def view(self, *, strict: bool) -> torch.Tensor:
        """Return booleans [batch, 1, rows, keys] for a layer. `strict` masks the diagonal."""
        if not strict:
            return self.causal
        keys = torch.arange(self.causal.shape[-1], device=self.causal.device)
        return self.causal & (keys != self.places)


def rotated(states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate states to positions.

    Parameters
    ----------
    states : Tensor, shape [batch, heads, rows, dim]
        Queries or keys.
    rotary : tuple[Tensor, Tensor]
        Cosines and sines of the positions, each [batch, rows, dim].
    """
    cos, sin = (part.unsqueeze(1) for part in rotary)
    return states * cos + rotate_half(states) * sin


class LCKVAttention(nn.Module):
    """Attention of one layer to the KV of its target, which is another layer or itself.

    A layer that is no layer's target has no key and value projections.

    Parameters
    ----------
    config : LCKVLlamaConfig
        Configuration of the model. The target is `config.layout.targets[layer]`.
    layer : int
        Index of the layer.
    """

    def __init__(self, config: LCKVLlamaConfig, layer: int) -> None:
        super().__init__()
        layout = config.layout
        heads, kv_heads, dim = (
            config.num_attention_heads,
            config.num_key_value_heads or 1,
            config.head_dim or 1,
        )
        hidden, bias = config.hidden_size, config.attention_bias

        self.layer, self.head_dim = layer, dim
        self.target = layout.targets[layer]
        # A condensed layer runs before its target has this token's KV.
        self.strict = layout.attends_above(layer) or config.force_nodiag
        self.computes_kv = layer in layout.kv_layers
        self.dropout = float(config.attention_dropout or 0.0)

        self.q_proj = nn.Linear(hidden, heads * dim, bias=bias)
        if self.computes_kv:
            self.k_proj = nn.Linear(hidden, kv_heads * dim, bias=bias)
            self.v_proj = nn.Linear(hidden, kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=bias)

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def keys_values(self, normed: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> KV:
        """Return this layer's rotated keys and its values, each [batch, kv heads, rows, dim]."""
        return rotated(self._heads(self.k_proj(normed)), rotary), self._heads(self.v_proj(normed))

    def queries(
        self, normed: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Return the rotated queries, [batch, heads, rows, dim]."""
        return rotated(self._heads(self.q_proj(normed)), rotary)

    def forward(
        self,
        normed: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv: KV | None,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        """Attend to keys and values of the target.

        A row that sees no key gets zero, as if its only key had the value zero.

        Parameters
        ----------
        normed : Tensor, shape [batch, rows, hidden]
            Normalized hidden states.
        rotary : tuple[Tensor, Tensor]
            Cosines and sines of the rows' positions.
        kv : KV or None
            Keys and values [batch, kv heads, keys, dim]; None if there are none at all.
        seen : Tensor, shape [batch, 1, rows, keys]
            Booleans: whether a row sees a key.

        Returns
        -------
        Tensor, shape [batch, rows, hidden]
            Output of the layer's attention.
        """
        if kv is None:
            mixed = normed.new_zeros(*normed.shape[:2], self.o_proj.in_features)
        else:
            blind = ~seen.any(-1, keepdim=True)
            # A row without a key would be NaN: it sees all of them, and is cleared afterwards.
            out = F.scaled_dot_product_attention(
                self.queries(normed, rotary),
                *kv,
                attn_mask=seen | blind,
                dropout_p=self.dropout if self.training else 0.0,
                enable_gqa=True,
            )
            mixed = out.masked_fill(blind, 0.0).transpose(1, 2).flatten(2)

        return self.o_proj(mixed)


class LCKVDecoderLayer(nn.Module):
    """Attention and feed-forward with their norms, as in a Llama."""

    def __init__(self, config: LCKVLlamaConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = LCKVAttention(config, layer)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
