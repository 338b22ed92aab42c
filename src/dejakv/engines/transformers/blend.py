"""From donors' chunks and a token map to a cache that a model prefills partially."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dejakv.engines.base import ComputedRows
from dejakv.engines.tensors import borrowed, room_for
from dejakv.engines.transformers.blend_cache import BlendCache, BlendLayer
from dejakv.engines.transformers.blend_check import seams_of
from dejakv.engines.transformers.blend_rows import MadeOf, computed_rows
from dejakv.engines.transformers.blend_seams import Seams
from dejakv.errors import ModelError
from dejakv.reuse.attention_probe import AttentionProbe
from dejakv.reuse.blend import BlendReport
from dejakv.reuse.need import Need
from dejakv.reuse.offsets import runs_of
from dejakv.reuse.rows import RowPlan
from dejakv.reuse.schedule import Schedule
from dejakv.reuse.selector import Selector
from dejakv.reuse.slices import copy_part, sliced
from dejakv.reuse.surroundings import surroundings_of
from dejakv.reuse.token_map import Donors, Ids, TokenMap
from dejakv.store.base import Tensor as Stored

State = Sequence[tuple[int, Stored]]
"""Of one donor: stacked tensors (`Chunk.tensor`), each with the number of its first row. They hold all rows that a map takes."""


@dataclass
class PlannedBlend:
    """See `Planned`.

    made_of  what it was planned from, where its rows are to be kept
    asked    rows that the question's own pass computed, to choose the others
    """

    cache: BlendCache
    made_of: MadeOf | None = None
    label: str = ""
    asked: float = 0.0

    def computed_tokens(self) -> int:
        """Prompt rows computed, the question's pass included: the mean over layers rounded up."""
        return math.ceil(self.cache.trace.mean + self.asked - 1e-9)

    def priced_rows(self) -> float:
        return self.computed_tokens()

    def told(self, report: BlendReport) -> BlendReport:
        trace = self.cache.trace
        active = tuple(None if rows is None else tuple(rows.tolist()) for rows in trace.rows)
        return replace(report, rows=tuple(trace.counts), active=active, asked=self.asked)

    def rows(self) -> ComputedRows | None:
        """After the run: what later blends may take from it."""
        return computed_rows(self.cache, self.made_of) if self.made_of is not None else None


@torch.no_grad()
def plan_cache(
    model: Any,
    target: Sequence[int],
    states: Sequence[State],
    donors: Donors,
    found: TokenMap,
    needed: Need,
    schedule: Schedule,
    selector: Selector,
    *,
    threshold: float | None = None,
    offsets: bool = False,
    surroundings: bool = False,
) -> PlannedBlend:
    """Rearranges the donors' state into the target's order and moves its keys to the target's positions.

    states     of each donor, in the order of `donors`
    threshold  see `RowPlan`
    offsets, surroundings  see `BlendConfig`

    Raises: ModelError for a model that blending is refused for, or a state of another shape.
    """
    seams = seams_of(model)
    device, dtype = model.device, model.dtype
    tokens = len(target)
    if len(schedule.shares) != len(seams.layers):
        raise ModelError(f"the schedule names {len(schedule.shares)} layers, the model has {len(seams.layers)}")
    complete = next((i for i, share in enumerate(schedule.shares) if share < 1.0), len(seams.layers))
    injected = rearrange(seams, states, donors, found, device, dtype, first=complete)
    empty = injected.new_empty((1, injected.shape[2], tokens, injected.shape[4])) if complete else injected
    layers = [BlendLayer(empty, empty) for _ in range(complete)]
    layers += [BlendLayer(k[None], v[None]) for k, v in zip(injected[0], injected[1], strict=True)]
    similarity = torch.from_numpy(found.similarity).to(device)
    forced = torch.from_numpy(needed.forced).to(device)
    left = torch.from_numpy(needed.left).to(device) if needed.left.any() else None
    ids = np.asarray(target, dtype=np.int64)
    plan = RowPlan(
        schedule, selector, similarity, forced, threshold, left=left, exact=needed.exact,
        runs=runs_of(ids, donors, found, needed.exact) if offsets else None,
        around=surroundings_of(ids, donors, found) if surroundings else None,
    )  # fmt: skip
    asked = 0.0
    if selector.asks and plan.ranks:  # else the forced rows are all that is computed
        scores, asked = query_attention(model, seams, target, layers, plan, needed.tail)
        plan = replace(plan, threshold=None, scores=scores)
    return PlannedBlend(BlendCache(layers, plan, seams), asked=asked)


def rearrange(
    seams: Seams,
    states: Sequence[State],
    donors: Donors,
    found: TokenMap,
    device: Any,
    dtype: torch.dtype,
    first: int = 0,
) -> Tensor:
    """The donors' K and V in target order, `[2, layers - first, kv_heads, tokens, head_dim]`, keys at target positions."""
    tokens = len(found)
    out: Tensor | None = None
    first_position, stops = donors.first or (0,) * len(states), donors.stops
    for index, rows, places in donors.parts(found.source):
        left = len(places)
        for start, part in states[index]:
            state = borrowed(part)
            if (
                state.dim() != 5
                or state.shape[1] != len(seams.layers)
                or start + state.shape[3] > donors.lengths[index]
            ):
                raise _foreign(part, donors.lengths[index], seams)
            if out is None:
                shape = (2, state.shape[1] - first, state.shape[2], tokens, state.shape[4])
                out = room_for(shape, dtype, device)
            left -= copy_part(state[:, first:], start, places, out, rows)
        if left or out is None:
            length = donors.lengths[index]
            raise ModelError(
                f"a donor's state lacks {left} of the rows that are taken: it does not fit {length} tokens"
            )
        _move(seams, out[0], rows, places + first_position[index], stops[index], first)
    assert out is not None
    return out


def _foreign(state: Stored, length: int, seams: Seams) -> ModelError:
    return ModelError(
        f"a donor's state of shape {tuple(state.shape)} does not fit {length} tokens of a model of {len(seams.layers)} layers: "
        "it is of another model"
    )


def _move(seams: Seams, keys: Tensor, rows: Ids, source: Ids, length: int, first: int) -> None:
    """Turns the keys `[layers - first, kv_heads, tokens, head_dim]` of these rows from positions `source` of a prompt of `length`
    tokens to their own, in place."""
    tokens = keys.shape[2]
    if seams.fixed or length == tokens:
        rows, source = rows[rows != source], source[rows != source]
    if not rows.size:
        return
    to, of = (torch.from_numpy(places).to(keys.device) for places in (rows, source))
    runs, apart = sliced(rows)
    for begin, end in runs:
        part = keys[:, :, rows[begin] : rows[begin] + end - begin]
        seams.move(part, to[begin:end], of[begin:end], length, tokens, first)
    if len(apart):
        at = torch.from_numpy(apart).to(keys.device)
        moved = keys.index_select(2, to[at])
        seams.move(moved, to[at], of[at], length, tokens, first)
        keys.index_copy_(2, to[at], moved)


def query_attention(
    model: Any, seams: Seams, target: Sequence[int], layers: list[BlendLayer], plan: RowPlan, tail: int
) -> tuple[Tensor, float]:
    """How much the prompt's last `tail` tokens attend to each token, over the layers that the selector asks: `[tokens]`; and the rows
    computed for it, the mean over layers.

    One pass of those rows alone over the donors' state. It writes only them, and they are put back: offsets tell by the donors'
    state how far it is off.
    """
    donors = [(layer.keys[:, :, -tail:].clone(), layer.values[:, :, -tail:].clone()) for layer in layers]
    scratch = [BlendLayer(layer.keys, layer.values) for layer in layers]
    cache = BlendCache(scratch, plan.of_question(tail), seams)
    ids = torch.tensor([list(target)], device=model.device)
    with AttentionProbe(tail, plan.selector.first_asked(len(layers))) as probe:
        model.get_decoder()(input_ids=ids, past_key_values=cache, use_cache=True)  # nobody asks for logits
    for layer, (keys, values) in zip(layers, donors, strict=True):
        layer.keys[:, :, -tail:], layer.values[:, :, -tail:] = keys, values
    return probe.total(len(target)), cache.trace.mean
