"""Top-layer reuse on an ordinary model, for study alone: the prompt skips every layer but the last.

The last layer holds the donor's keys and values, the layers below hold nothing of the prompt but the computed tail. Layers
of unequal length can only be continued one token at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from dejakv.engines.base import ComputedRows, Prepared
from dejakv.engines.tensors import borrowed
from dejakv.engines.transformers.kv import filled_layer
from dejakv.records import UNSOUND_LABEL
from dejakv.reuse.blend import BlendReport
from dejakv.reuse.top_layer import TopLayerConfig
from dejakv.store.base import Chunk


class TopOnlyCache(DynamicCache):
    """Layers of unequal length. `tokens`: those of the prompt and the answer so far, which `generate` is told."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        if layer_idx == 0:
            self.tokens += key_states.shape[-2]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens


@dataclass
class PlannedUnsound:
    """An ordinary model's run; see `Planned`. Rows that run pass every layer."""

    cache: TopOnlyCache
    tokens: int
    computed: int
    layers: int
    label: str = UNSOUND_LABEL

    def computed_tokens(self) -> int:
        return self.computed

    def priced_rows(self) -> float:
        return self.computed

    def rows(self) -> ComputedRows | None:
        return None

    def told(self, report: BlendReport) -> BlendReport:
        active = tuple(range(self.tokens - self.computed, self.tokens))
        return replace(report, rows=(self.computed,) * self.layers, active=(active,) * self.layers)


def why_not_unsound(model: Any) -> str:
    """Why not even that can be run with a model; empty if it can: a text model whose layers attend to everything."""
    config = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if (
        kinds != {"full_attention"}
        or getattr(config, "num_kv_shared_layers", 0)
        or hasattr(model.config, "vision_config")
    ):
        return (
            f"{type(model).__name__} has windows, shared KV or pictures, for which layers of unequal length are not made: study an "
            "ordinary text model such as smollm2-135m"
        )
    if model.config._attn_implementation != "sdpa":
        return "layers of unequal length need the attention implementation 'sdpa': load the model with --attn sdpa"
    return ""


def plan_unsound(
    model: Any, prepared: Prepared, chunk: Chunk, config: TopLayerConfig, beams: int
) -> tuple[PlannedUnsound | None, BlendReport]:
    """The cache with all but the last token, or None with the reason in the report."""
    ids = prepared.token_ids
    report = BlendReport(len(ids), read_bytes=chunk.tensor.nbytes)
    if beams != 1:
        return None, replace(report, reason="layers of unequal length cannot be searched with beams")
    state = borrowed(chunk.tensor)[:, -1:].to(model.device)
    heads = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
    if state.dtype != model.dtype or state.shape[2] != heads:
        return None, replace(report, reason=f"a donor's state of shape {tuple(state.shape)} is of another model")
    first = taken_of(len(ids), state.shape[3], config.tail)
    if reason := config.not_worth(len(ids) - first, len(ids)):
        return None, replace(report, reason=reason)
    cache = filled_below(model, ids, (state[0], state[1]), first)
    return PlannedUnsound(cache, len(ids), len(ids) - first, model.config.num_hidden_layers), report


def taken_of(tokens: int, donor: int, tail: int) -> int:
    """How many rows from the beginning a prompt takes from a donor, each the one of its own place."""
    return max(0, min(tokens - tail, donor))


@torch.inference_mode()
def filled_below(
    model: Any, token_ids: Sequence[int], kv: tuple[torch.Tensor, torch.Tensor], first: int
) -> TopOnlyCache:
    """A cache of all tokens but the last. The top layer's rows before `first` are the donor's `kv` `[1, heads, tokens, dim]`; the
    others run through all layers, each seeing there only those before it."""
    cache = TopOnlyCache(first)
    layers: list[Any] = [
        filled_layer(kv[0][:, :, :0], kv[1][:, :, :0]) for _ in range(model.config.num_hidden_layers - 1)
    ]
    cache.layers = [*layers, filled_layer(kv[0][:, :, :first], kv[1][:, :, :first])]
    for place in range(first, len(token_ids) - 1):
        model(
            torch.tensor([[token_ids[place]]], device=model.device),
            past_key_values=cache,
            position_ids=torch.tensor([[place]], device=model.device),
            use_cache=True,
        )
    return cache


def top_layer_kv(cache: Cache, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [1, kv heads, tokens, dim] of the last layer, as a miss computed them."""
    top: Any = cache.layers[-1]
    return top.keys[0, None, :, :tokens].clone(), top.values[0, None, :, :tokens].clone()
