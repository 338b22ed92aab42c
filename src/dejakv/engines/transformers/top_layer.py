"""Top-layer reuse of the transformers engine: whether a model takes it, and a cache that begins with donors' top-layer rows.

Ordinary bottom layers run over the whole prompt. The donors' rows fill the layers that the condensed ones attend to, and only
the rows that are computed pass those.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dejakv.blend.blend import BlendReport
from dejakv.blend.rope import turn
from dejakv.blend.settings import too_dear
from dejakv.blend.token_map import DonorTokens, Ids
from dejakv.blend.top_layer import TopLayerConfig, computed_rows, take_rows
from dejakv.engines.base import ComputedRows, Prepared
from dejakv.engines.tensors import borrowed
from dejakv.models.lckv.attention import rotated
from dejakv.models.lckv.cache import KV, GivenRows, LCKVCache
from dejakv.models.lckv.layout import KVLayout, layout_of
from dejakv.store.base import KV as EXACT
from dejakv.store.base import StoredState

UNSOUND = (
    "in an ordinary model every layer attends to its own KV. A prompt that skips the layers below the top leaves them empty, "
    "so that generated tokens do not see it there (docs/prototypes/sim-llm.md has the measured answers)"
)


def why_not(engine: Any) -> str:
    """Why an engine's model takes no top-layer state; empty if it does. See `Engine.no_top_layer`."""
    if layout_of(engine.model) is None:
        return f"{type(engine.model).__name__} cannot take the top layer's KV of others: {UNSOUND}"
    return "" if engine.capabilities.reuse else engine.capabilities.reasons["reuse"]


@dataclass
class PlannedTopLayer:
    """An LCKV model's prefill that is completed by `compute`. Nothing of it is kept: its rows stand on other prompts' state."""

    cache: LCKVCache
    layout: KVLayout
    tokens: int
    computed: tuple[int, ...]

    def counts(self) -> list[int]:
        """Rows of each layer."""
        rows = len(self.computed)
        return [self.tokens if layer in self.layout.bottom else rows for layer in range(self.layout.layers)]

    def computed_tokens(self) -> int:
        counts = self.counts()
        return math.ceil(sum(counts) / len(counts))

    def priced_rows(self) -> float:
        """The condensed layers', which iterate; the others run once."""
        return len(self.computed)

    def rows(self) -> ComputedRows | None:
        return None

    def told(self, report: BlendReport) -> BlendReport:
        counts = self.counts()
        active = tuple(None if count == self.tokens else self.computed for count in counts)
        return replace(report, rows=tuple(counts), active=active)


def plan_top_layer(
    engine: Any, prepared: Prepared, chunks: Sequence[StoredState], config: TopLayerConfig
) -> tuple[PlannedTopLayer | None, BlendReport]:
    """The planned cache, or None with the reason in the report."""
    tokens = len(prepared.token_ids)
    if any(chunk.meta.epoch not in ("", engine.epoch) for chunk in chunks):
        return None, BlendReport(tokens, reason="a donor's state is of another model")
    if any(chunk.meta.kind != EXACT for chunk in chunks):
        return None, BlendReport(tokens, reason="a donor's state is a part of a prompt's")
    if reason := why_not(engine):
        return None, BlendReport(tokens, reason=reason)

    layout = layout_of(engine.model)
    assert layout is not None

    donors = DonorTokens.of(*(chunk.meta.token_ids for chunk in chunks))
    ends = engine.sentence_ends
    row_sources = take_rows(prepared.token_ids, donors, "map", engine.embed_tokens, tail=config.tail, ends=ends)
    computed = computed_rows(row_sources)

    report = BlendReport(tokens, read_bytes=sum(chunk.tensor.nbytes for chunk in chunks))
    if reason := too_dear(config, len(computed) / tokens, len(computed) / tokens):
        return None, replace(report, reason=reason)

    states = [borrowed(chunk.tensor) for chunk in chunks]
    if misfit := _foreign(states, donors, layout, engine.model):
        return None, replace(report, reason=misfit)

    # Stored state has only the layers that compute KV: places of layers among these.
    slots = [layout.kv_layers.index(layer) for layer in layout.task_layers]
    stacked = torch.cat([state[:, slots].to(engine.device) for state in states], dim=3)
    kv = moved_rows(engine.model, stacked, row_sources, donors.positions)
    donor_rows = GivenRows(
        {layer: (keys[None], values[None]) for layer, (keys, values) in zip(layout.task_layers, kv, strict=True)},
        torch.from_numpy(computed)[None].to(engine.device),
    )
    cache = LCKVCache(layout, donor_rows, settled=True)
    return PlannedTopLayer(cache, layout, tokens, tuple(computed.tolist())), report


def moved_rows(model: Any, state: torch.Tensor, row_sources: Ids, positions: np.ndarray) -> list[KV]:
    """For each stored layer the donors' keys and values `[kv heads, n, dim]` in the target's order, keys turned to its positions. Rows that
    are computed have any content.

    state      `[2, layers, kv heads, donor tokens, dim]`, all donors in a row
    positions  `[donor tokens]` at which each was computed
    """
    # A computed row has -1: any row may stand in its place.
    source = torch.from_numpy(np.maximum(row_sources, 0))
    target_places, source_places = torch.arange(len(source)), torch.from_numpy(positions)[source]

    rows = state.index_select(3, source.to(state.device))
    keys, values = rows[0], rows[1]
    # A rotation by nothing would still round.
    if not torch.equal(target_places, source_places):
        # Float32, whatever the model's dtype: tables take the type of `like`.
        rotary, like = model.model.rotary_emb, torch.zeros(1, device=state.device)
        tables = turn(
            rotary(like, target_places[None].to(state.device)), rotary(like, source_places[None].to(state.device))
        )
        keys = rotated(keys.float(), tables).to(keys.dtype)
    return list(zip(keys, values, strict=True))


def _foreign(states: Sequence[torch.Tensor], donors: DonorTokens, layout: KVLayout, model: Any) -> str:
    """Why a donor's state does not fit this model; empty if all fit."""
    layers, heads, dim = len(layout.kv_layers), model.config.num_key_value_heads, model.config.head_dim
    for state, length in zip(states, donors.lengths, strict=True):
        if state.dtype != model.dtype or state.shape != (2, layers, heads, length, dim):
            return f"a donor's state of shape {tuple(state.shape)} in {state.dtype} is of another model"
    return ""
