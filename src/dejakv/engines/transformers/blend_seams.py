"""What blending needs to know of a model: its decoder layers, how its keys rotate, where a layer's V comes from.

Nothing is looked up by model name. How each layer's keys carry positions is learnt from the model itself: the same tokens
are run at shifted positions, and whatever turns the first keys into the second is that layer's rotation (none at all in
layers without positions, as Cohere2 has).
"""

import copy
import inspect
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dejakv.errors import ModelError
from dejakv.reuse.rope import ApplyRotary, Tables, rotate, turn

FIXED = ("default", "linear", "yarn", "llama3")
"""Kinds of rotary tables that do not depend on a prompt's length."""


@dataclass(frozen=True)
class Mover:
    """How one layer's keys move. `partial`: see `rope.rotate`; `kind`: the layer type its tables are made for."""

    apply: ApplyRotary
    partial: bool = False
    kind: str | None = None


@dataclass
class Seams:
    """A model as blending sees it. `movers[i]` is None where layer i's keys carry no position.

    direct  V of a layer is `v_proj(input_layernorm(hidden))`, so it can be had without running the layer
    """

    layers: list[Any]
    rotary: Any
    movers: list[Mover | None]
    direct: bool = False
    _tables: dict[tuple[str | None, int], Tables] = field(default_factory=dict, repr=False)

    @property
    def fixed(self) -> bool:
        """Whether a position is rotated alike in prompts of any length."""
        return getattr(self.rotary, "rope_type", "default") in FIXED

    def values(self, index: int, layer: Any, hidden: Tensor, like: Tensor) -> Tensor | None:
        """V of the rows from the layer's input, `[batch, kv_heads, rows, head_dim]`; None where only the layer knows how."""
        if not self.direct:
            return None
        made = layer.self_attn.v_proj(layer.input_layernorm(hidden))
        return made.view(*hidden.shape[:2], -1, like.shape[-1]).transpose(1, 2)

    def tables(self, length: int, kind: str | None) -> Tables:
        """cos and sin in float32, `[1, >= length tokens, d]`, as a prompt of `length` tokens is rotated. Kept for the next."""
        rows = max(512, 1 << (length - 1).bit_length()) if self.fixed else length
        held = self._tables.get((kind, rows))
        if held is None:
            if len(self._tables) >= 8:
                self._tables.pop(next(iter(self._tables)))
            held = self._tables[kind, rows] = self._make_tables(rows, kind)
        return held

    def _make_tables(self, length: int, kind: str | None) -> Tables:
        # A copy that has seen no prompt: some rotary modules remember the longest one.
        rotary = copy.deepcopy(self.rotary)
        _forget(rotary)
        device = next(self.rotary.buffers()).device
        probe = torch.zeros(1, 1, 1, dtype=torch.float32, device=device)
        extra = (kind,) if kind is not None else ()
        with torch.inference_mode(False), torch.no_grad():
            cos, sin = rotary(probe, torch.arange(length, device=device)[None], *extra)
        return cos.float(), sin.float()

    def move(
        self, keys: Tensor, target: Tensor, source: Tensor, source_length: int, target_length: int, first: int = 0
    ) -> None:
        """Turns keys `[layers, kv_heads, tokens, head_dim]` of layers `first`.. from positions `source` to `target` (`[tokens]`), in
        place.

        source_length, target_length  tokens of the prompts: tables may depend on them (dynamic NTK, longrope)
        """
        same = self.fixed or source_length == target_length
        if not len(keys) or (same and torch.equal(target, source)):
            return
        movers = self.movers[first:]
        for mover in {m for m in movers if m is not None}:
            here = [i for i, m in enumerate(movers) if m == mover]
            cos, sin = self.tables(source_length, mover.kind)
            old = (cos[:, source], sin[:, source])
            cos, sin = self.tables(target_length, mover.kind)
            tables = turn((cos[:, target], sin[:, target]), old)
            if len(here) == len(movers):
                rotate(mover.apply, keys, tables, partial=mover.partial, out=keys)
            else:
                keys[here] = rotate(mover.apply, keys[here], tables, partial=mover.partial)


def _forget(rotary: Any) -> None:
    """Puts a copied rotary module back to what it was before it saw any prompt."""
    for name, value in list(rotary.named_buffers(recurse=False)):
        kept = getattr(rotary, name.replace("inv_freq", "original_inv_freq"), None)
        if name.endswith("inv_freq") and "original" not in name and isinstance(kept, Tensor):
            value.data = kept.clone()
    original = getattr(rotary, "original_max_seq_len", None)
    if isinstance(original, int) and isinstance(getattr(rotary, "max_seq_len_cached", None), int):
        rotary.max_seq_len_cached = original


def find_seams(model: Any) -> Seams:
    """The parts, with movers still to be learnt (`blend_check.learn_movers`).

    Raises: ModelError naming what is missing.
    """
    name = type(model).__name__
    attention = getattr(model.config, "_attn_implementation", None)
    text = getattr(model.config, "get_text_config", lambda: model.config)()
    attention = getattr(text, "_attn_implementation", attention)
    if attention not in ("sdpa", "eager"):
        raise ModelError(
            f"blend needs the attention implementation 'sdpa' or 'eager', {name} was loaded with {attention!r}: "
            "other implementations cannot express rows that are not in a row; load it with --attn sdpa"
        )
    body = model.get_decoder() if hasattr(model, "get_decoder") else None
    layers = getattr(body, "layers", None)
    rotary = getattr(body, "rotary_emb", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(rotary, nn.Module):
        raise ModelError(
            f"blend cannot work with {name}: its decoder has no list of layers with a rotary embedding; use exact"
        )
    used = list(layers[: text.num_hidden_layers])
    apply = getattr(sys.modules[type(used[0]).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        raise ModelError(
            f"blend cannot work with {name}: its module has no rotary function to move keys with; use exact"
        )
    by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
    kinds = list(text.layer_types) if by_kind else [None] * len(used)
    return Seams(used, rotary, [Mover(apply, kind=kind) for kind in kinds])
