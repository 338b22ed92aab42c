"""Top-layer reuse of the transformers engine: a cache that begins with donors' top-layer rows.

Ordinary bottom layers run over the whole prompt. The donors' rows fill the layers that the
condensed ones attend to, and only the rows that are computed pass those.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dejakv.blend.blend import BlendReport
from dejakv.blend.rope import turn
from dejakv.blend.settings import why_too_dear
from dejakv.blend.token_map import DonorTokens, Ids
from dejakv.engines.base import UNREADABLE, ComputedRows, Donor, Prepared
from dejakv.engines.tensors import tensor_view
from dejakv.prototypes.lckv.attention import rotated
from dejakv.prototypes.lckv.cache import KV, GivenRows, LCKVCache
from dejakv.prototypes.lckv.layout import KVLayout, layout_of
from dejakv.prototypes.top_layer.method import TOP_LAYER
from dejakv.prototypes.top_layer.rows import TopLayerConfig, computed_rows, take_rows
from dejakv.store.base import KV as EXACT


@dataclass
class PlannedTopLayer:
    """An LCKV model's prefill that is completed by `compute`.

    Nothing of it is stored: its rows stand on other prompts' state.

    Attributes
    ----------
    tokens : int
        Tokens of the prompt.
    computed : tuple[int, ...]
        Rows that pass the condensed layers.
    """

    cache: LCKVCache
    layout: KVLayout
    tokens: int
    computed: tuple[int, ...]

    def counts(self) -> list[int]:
        """Return the number of rows that each layer computes."""
        rows = len(self.computed)
        return [
            self.tokens if layer in self.layout.bottom else rows
            for layer in range(self.layout.layers)
        ]

    def computed_tokens(self) -> int:
        """Return the mean of the layers' rows, rounded up."""
        counts = self.counts()
        return math.ceil(sum(counts) / len(counts))

    def priced_rows(self) -> float:
        """Return the rows of the condensed layers, which iterate; the others run once."""
        return len(self.computed)

    def rows(self) -> ComputedRows | None:
        """Return None: no row is stored for later blends."""
        return None

    def fill_report(self, report: BlendReport) -> BlendReport:
        """Return the report with the rows of each layer."""
        counts = self.counts()
        active = tuple(None if count == self.tokens else self.computed for count in counts)
        return replace(report, rows=tuple(counts), active=active)


def plan_top_layer(
    engine: Any, prepared: Prepared, donors: Sequence[Donor], config: TopLayerConfig
) -> tuple[PlannedTopLayer | None, BlendReport]:
    """Plan a prefill from donors' top-layer rows.

    Returns
    -------
    tuple[PlannedTopLayer | None, BlendReport]
        None with the reason in the report, if it is not possible or does not pay.
    """
    tokens = len(prepared.token_ids)
    donor_states = [state for donor in donors if (state := donor.whole()) is not None]
    if not donor_states:
        return None, BlendReport(tokens, reason=UNREADABLE)
    if any(state.meta.epoch not in ("", engine.epoch) for state in donor_states):
        return None, BlendReport(tokens, reason="a donor's state is of another model")
    if any(state.meta.kind != EXACT for state in donor_states):
        return None, BlendReport(tokens, reason="a donor's state is a part of a prompt's")
    if reason := TOP_LAYER.unsupported(engine):
        return None, BlendReport(tokens, reason=reason)

    layout = layout_of(engine.model)
    assert layout is not None

    donor_tokens = DonorTokens.of(*(state.meta.token_ids for state in donor_states))
    ends = engine.sentence_ends
    row_sources = take_rows(
        prepared.token_ids, donor_tokens, "map", engine.embed_tokens, tail=config.tail, ends=ends
    )
    computed = computed_rows(row_sources)

    report = BlendReport(tokens, read_bytes=sum(state.tensor.nbytes for state in donor_states))
    if reason := why_too_dear(config, len(computed) / tokens, len(computed) / tokens):
        return None, replace(report, reason=reason)

    states = [tensor_view(state.tensor) for state in donor_states]
    if misfit := _foreign(states, donor_tokens, layout, engine.model):
        return None, replace(report, reason=misfit)

    # Stored state has only the layers that compute KV: places of layers among these.
    slots = [layout.kv_layers.index(layer) for layer in layout.task_layers]
    stacked = torch.cat([state[:, slots].to(engine.device) for state in states], dim=3)
    kv = moved_rows(engine.model, stacked, row_sources, donor_tokens.positions)
    donor_rows = GivenRows(
        {
            layer: (keys[None], values[None])
            for layer, (keys, values) in zip(layout.task_layers, kv, strict=True)
        },
        torch.from_numpy(computed)[None].to(engine.device),
    )
    cache = LCKVCache(layout, donor_rows, settled=True)
    return PlannedTopLayer(cache, layout, tokens, tuple(computed.tolist())), report


def moved_rows(
    model: Any, state: torch.Tensor, row_sources: Ids, positions: np.ndarray
) -> list[KV]:
    """Return each stored layer's keys and values in the target's order, keys at its positions.

    Rows that are computed have any content.

    Parameters
    ----------
    state : Tensor, shape [2, layers, kv_heads, donor tokens, dim]
        State of all donors in a row.
    row_sources : Ids
        Donor token of each row of the target; -1 for a computed row.
    positions : NDArray, shape [donor tokens]
        Position at which each donor token was computed.

    Returns
    -------
    list[KV]
        Keys and values `[kv_heads, n, dim]` of each layer.
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
            rotary(like, target_places[None].to(state.device)),
            rotary(like, source_places[None].to(state.device)),
        )
        keys = rotated(keys.float(), tables).to(keys.dtype)
    return list(zip(keys, values, strict=True))


def _foreign(
    states: Sequence[torch.Tensor], donors: DonorTokens, layout: KVLayout, model: Any
) -> str:
    """Return why a donor's state does not fit this model; empty if all fit."""
    config = model.config
    layers, heads, dim = len(layout.kv_layers), config.num_key_value_heads, config.head_dim
    for state, length in zip(states, donors.lengths, strict=True):
        if state.dtype != model.dtype or state.shape != (2, layers, heads, length, dim):
            return (
                f"a donor's state of shape {tuple(state.shape)} in {state.dtype} is of another "
                "model"
            )
    return ""
