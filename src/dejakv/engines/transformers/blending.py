"""A blend of the transformers engine.

Donors' KV entries and a token map become a cache to prefill.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dejakv.blend.attention_probe import AttentionProbe
from dejakv.blend.blend import BlendReport, map_donors, refusal_reason
from dejakv.blend.forced import ForcedTokens
from dejakv.blend.recomputed import Choose, RecomputePlan, highest
from dejakv.blend.settings import BlendConfig, first_asked
from dejakv.blend.slices import copy_part, ranges_of, split_runs
from dejakv.blend.token_map import DonorTokens, Ids, TokenMap, long_runs, mark_new_text
from dejakv.decide.copied.fingerprints import SHORTEST_FINDABLE_RUN, media_token_ids
from dejakv.decide.copied.foreign import ForeignContext
from dejakv.engines.base import UNREADABLE, ComputedRows, Donor, Prepared
from dejakv.engines.tensors import empty_tensor, tensor_view, to_store
from dejakv.engines.transformers.blend_model import (
    BlendCache,
    BlendLayer,
    BlendModel,
    KeyMover,
)
from dejakv.engines.transformers.state_layout import StateLayout
from dejakv.errors import ModelError
from dejakv.models.cache_name import CACHE_NAME
from dejakv.store.base import RawTensor as Stored
from dejakv.store.base import StateInfo, StoredState

State = Sequence[tuple[int, Stored]]
"""KV entries of one donor: stacked tensors (`StoredState.tensor`), each with its first row.

Together they hold all mapped rows.
"""


class PlannedPrefill(Protocol):
    """A prefill that begins with rows of other prompts, and that the engine completes.

    Single use: the run fills its cache.
    """

    @property
    def cache(self) -> Any:
        """Cache that holds the rows which are not computed."""
        ...

    def computed_tokens(self) -> int:
        """Return the prompt tokens that are computed, as a mean over layers, rounded up."""
        ...

    def priced_rows(self) -> float:
        """Return the rows that the costs count."""
        ...

    def rows(self) -> ComputedRows | None:
        """Return the rows to store for later blends; None for none. Call it after the run."""
        ...

    def fill_report(self, report: BlendReport) -> BlendReport:
        """Return the report with what the prefill computed."""
        ...


@dataclass
class PlannedBlend:
    """A cache that is ready for its prefill.

    Attributes
    ----------
    donors : DonorTokens
        Tokens of the donors.
    donor_map : TokenMap
        Which donor's token stands for which token of the prompt.
    question_tokens : int
        Tokens computed by the question's own pass, to rank the others.
    target : Ids or None
        The prompt's tokens, pictures among them, if recomputed tokens are to be kept.
    metas : Sequence[StateInfo]
        Descriptions of the donors, with `target`.
    layout : StateLayout or None
        Layout by which the model's state is stored, if it is by one.
    """

    cache: BlendCache
    donors: DonorTokens
    donor_map: TokenMap
    question_tokens: int = 0
    target: Ids | None = None
    metas: Sequence[StateInfo] = ()
    layout: StateLayout | None = None

    def computed_tokens(self) -> int:
        """Count the prompt tokens that are computed, the question's pass included."""
        return self.cache.recomputed + self.question_tokens

    def priced_rows(self) -> float:
        """Return the rows that the costs count: all computed tokens."""
        return self.computed_tokens()

    def fill_report(self, report: BlendReport) -> BlendReport:
        """Return the report with what the prefill computed."""
        cache = self.cache
        active = None if cache.rows is None else tuple(cache.rows.tolist())
        return replace(
            report,
            rows=(cache.recomputed,) * len(cache.blends),
            active=active,
            question_tokens=self.question_tokens,
        )

    def rows(self) -> ComputedRows | None:
        """Return the new text among the recomputed tokens, for later blends.

        Call it after the run. None if there is too little text to be looked up again.
        """
        if self.target is None:
            return None
        rows = self.cache.rows
        computed = np.full(self.cache.tokens, rows is None)
        if rows is not None:
            computed[rows.cpu().numpy()] = True

        fresh = mark_new_text(self.target, self.donors, self.donor_map, SHORTEST_FINDABLE_RUN)
        runs = long_runs(computed & fresh, SHORTEST_FINDABLE_RUN)
        if not runs:
            return None

        metas = [
            self.metas[number]
            for number in np.unique(self.donors.number[self.donor_map.source]).tolist()
        ]
        generation = 1 + max(meta.generation for meta in metas)
        return ComputedRows(runs, tuple(meta.id for meta in metas), generation, self._captured)

    def _captured(self, first: int, stop: int) -> Stored:
        """Copy K and V of the tokens, as they are stored, to the CPU."""
        if self.layout is not None:
            packed = self.layout.pack(self.cache, stop, first)
            assert packed is not None
            return packed
        layers = self.cache.blends
        parts = [
            getattr(layer, kind)[0, :, first:stop]
            for kind in ("keys", "values")
            for layer in layers
        ]
        return to_store(torch.stack(parts).unflatten(0, (2, len(layers))).detach().cpu())


def plan_blend(
    engine: Any, prepared: Prepared, donors: Sequence[Donor], config: BlendConfig
) -> tuple[PlannedBlend | None, BlendReport]:
    """Plan a blend of a prompt.

    Donors that cannot be read are left out, and the map is made again without them.

    Returns
    -------
    tuple[PlannedBlend | None, BlendReport]
        None with the reason in the report, if the prompt cannot be blended.
    """
    tokens = len(prepared.token_ids)
    if any(donor.meta.epoch not in ("", engine.epoch) for donor in donors):
        return None, BlendReport(tokens, reason="a donor's state is of another model")
    if prepared.spans and places_by_picture(engine.model):
        return None, BlendReport(
            tokens, reason="pictures change this model's positions: its keys cannot be moved"
        )

    model: BlendModel | ModelError = engine.blend_model
    if isinstance(model, ModelError):
        return None, BlendReport(tokens, reason=str(model))

    target = media_token_ids(prepared.token_ids, prepared.spans)
    foreign = ForeignContext(target, config.foreign_context)
    usable = list(donors)
    while usable:
        metas = [donor.meta for donor in usable]
        donor_tokens = DonorTokens.of(
            *(
                foreign.hide(media_token_ids(meta.token_ids, meta.spans), meta.position)
                for meta in metas
            ),
            first=[meta.position for meta in metas],
        )
        # Only a donor computed in full from its first token on can give an exact prefix.
        exact = [meta.generation == meta.position == 0 for meta in metas]
        donor_map, needed = map_donors(
            target, donor_tokens, engine.embed_tokens, config, engine.sentence_ends, exact
        )
        mapped = time.perf_counter()

        # Decided before any state is read.
        if reason := refusal_reason(config, needed):
            return None, BlendReport(tokens, reason=reason)

        parts = _read(usable, donor_tokens, donor_map)
        if isinstance(parts, int):
            # The map is made again without it.
            del usable[parts]
            continue

        report = BlendReport(
            tokens,
            read_s=time.perf_counter() - mapped,
            read_bytes=_bytes_taken(parts, donor_tokens, donor_map),
        )
        states = [[(part.first, part.tensor) for part in donor_parts] for donor_parts in parts]
        planned = plan_cache(
            model, prepared.token_ids, states, donor_tokens, donor_map, needed, config
        )
        # Else a key's rotation depends on its prompt's length as well, which a run does not know.
        if model.fixed:
            planned.target, planned.metas = target, metas
        return planned, report
    return None, BlendReport(tokens, reason=UNREADABLE)


def _read(
    donors: Sequence[Donor], donor_tokens: DonorTokens, donor_map: TokenMap
) -> list[Sequence[StoredState]] | int:
    """Read the states with each donor's mapped rows; or return the index of an unreadable donor."""
    parts: list[Sequence[StoredState]] = [()] * len(donors)
    for number, _, places in donor_tokens.parts(donor_map.source):
        donor_parts = donors[number].read(ranges_of(places))
        if donor_parts is None:
            return number
        parts[number] = donor_parts
    return parts


def _bytes_taken(
    parts: Sequence[Sequence[StoredState]], donor_tokens: DonorTokens, donor_map: TokenMap
) -> int:
    total = 0.0
    for number, _, places in donor_tokens.parts(donor_map.source):
        rows = sum(stop - start for start, stop in ranges_of(places))
        first_part = parts[number][0]
        total += rows * first_part.tensor.nbytes / max(1, first_part.tensor.shape[3])
    return round(total)


def places_by_picture(model: Any) -> bool:
    """Tell whether a picture shapes the positions of the tokens behind it (M-RoPE)."""
    text = model.config.get_text_config()
    return "mrope_section" in str(
        getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or ""
    )


@torch.no_grad()
def plan_cache(
    model: BlendModel,
    target: Sequence[int],
    states: Sequence[State],
    donors: DonorTokens,
    donor_map: TokenMap,
    needed: ForcedTokens,
    config: BlendConfig,
    choose: Choose = highest,
) -> PlannedBlend:
    """Arrange the donors' KV entries for a prompt, and choose the recomputed tokens.

    The entries are put in the target's order, and their keys are moved to its positions.

    Parameters
    ----------
    target : Sequence[int]
        Tokens of the prompt.
    states : Sequence[State]
        KV entries of each donor, in the order of `donors`.
    needed : ForcedTokens
        Tokens that must be recomputed.
    choose : Choose
        The choice among the other tokens by their scores.

    Raises
    ------
    ModelError
        A state has another shape than the model's.
    """
    device = model.model.device
    entries = rearrange(model, states, donors, donor_map, device, model.model.dtype)
    layers = [BlendLayer(k[None], v[None]) for k, v in model.layer_states(entries)]

    ids = np.asarray(target, dtype=np.int64)
    plan = RecomputePlan.of(config, ids, donors, donor_map, needed, device, choose=choose)

    question_tokens = 0
    if plan.needs_question_pass:
        plan = plan.with_attention(question_attention(model, target, layers, plan, needed.tail))
        question_tokens = needed.tail
    cache = BlendCache(layers, plan)
    return PlannedBlend(cache, donors, donor_map, question_tokens, layout=model.layout)


def rearrange(
    model: BlendModel,
    states: Sequence[State],
    donors: DonorTokens,
    donor_map: TokenMap,
    device: Any,
    dtype: torch.dtype,
) -> Tensor:
    """Return the donors' KV entries in the target's order, keys at the target's positions.

    Returns
    -------
    Tensor, shape [2, layers, kv_heads, tokens, head_dim]
        As stored; of a model with a layout `[1, 1, 1, tokens, numbers]`. Rows without a donor have
        any content.

    Raises
    ------
    ModelError
        A state has another shape than the model's, or lacks mapped rows.
    """
    tokens = len(donor_map)
    out: Tensor | None = None
    first_position, stops = donors.first or (0,) * len(states), donors.stops

    for index, rows, places in donors.parts(donor_map.source):
        missing_rows = len(places)
        parts = sorted(states[index], key=lambda part: part[0])
        starts = np.array([start for start, _ in parts])
        # Each part's rows in turn: to look for them among all would take parts times rows.
        part_of = np.searchsorted(starts, places, side="right") - 1
        by_part = np.argsort(part_of, kind="stable")
        bounds = np.searchsorted(part_of[by_part], np.arange(len(starts) + 1))
        for number, (start, part) in enumerate(parts):
            state = tensor_view(part)
            if not model.fits(state) or start + state.shape[3] > donors.lengths[index]:
                raise ModelError(
                    f"a donor's state of shape {tuple(part.shape)} does not fit "
                    f"{donors.lengths[index]} tokens of a model of "
                    f"{len(model.movers)} layers: it is of another model"
                )
            # Heads and dimension are known with the first donor's state.
            if out is None:
                shape = (*state.shape[:3], tokens, state.shape[4])
                out = empty_tensor(shape, dtype, device)
            # Parts follow each other: each one fills the rows that it has.
            chosen = by_part[bounds[number] : bounds[number + 1]]
            missing_rows -= copy_part(state, start, places[chosen], out, rows[chosen])
        if missing_rows or out is None:
            length = donors.lengths[index]
            raise ModelError(
                f"a donor's state lacks {missing_rows} of the rows that are taken: it does not fit "
                f"{length} tokens"
            )
        for keys, movers in model.moving(out):
            _move(model, keys, movers, rows, places + first_position[index], stops[index])
    assert out is not None
    return out


def _move(
    model: BlendModel,
    keys: Tensor,
    movers: Sequence[KeyMover | None],
    rows: Ids,
    source: Ids,
    length: int,
) -> None:
    """Move the keys of some rows from positions `source` to the rows' own, in place.

    `keys` is `[layers, kv_heads, tokens, head_dim]`; `length` counts the tokens of the prompt that
    the positions are of.
    """
    tokens = keys.shape[2]
    if model.fixed or length == tokens:
        # A row at its own position needs no rotation.
        rows, source = rows[rows != source], source[rows != source]
    if not rows.size:
        return

    target_positions, source_positions = (
        torch.from_numpy(places).to(keys.device) for places in (rows, source)
    )
    # Long runs are moved in place, through views; scattered rows as copies.
    runs, scattered = split_runs(rows)
    for begin, end in runs:
        part = keys[:, :, rows[begin] : rows[begin] + end - begin]
        ends = target_positions[begin:end], source_positions[begin:end]
        model.move(part, *ends, length, tokens, movers)

    if len(scattered):
        scattered_index = torch.from_numpy(scattered).to(keys.device)
        moved = keys.index_select(2, target_positions[scattered_index])
        model.move(
            moved,
            target_positions[scattered_index],
            source_positions[scattered_index],
            length,
            tokens,
            movers,
        )
        keys.index_copy_(2, target_positions[scattered_index], moved)


def question_attention(
    model: BlendModel,
    target: Sequence[int],
    layers: Sequence[BlendLayer],
    plan: RecomputePlan,
    tail: int,
) -> Tensor:
    """Return how much the prompt's last `tail` tokens attend to each token: `[tokens]`.

    It is taken from the last third of the layers, in one pass of those tokens alone over the
    donors' KV entries. Their own entries are put back afterwards: offsets need the donors'.
    """
    donors = [
        (layer.keys[:, :, -tail:].clone(), layer.values[:, :, -tail:].clone()) for layer in layers
    ]
    cache = BlendCache(
        [BlendLayer(layer.keys, layer.values) for layer in layers], plan.of_question(tail)
    )
    ids = torch.tensor([list(target)], device=model.model.device)

    with AttentionProbe(tail, first_asked(len(layers))) as probe:
        # The decoder alone: no logits are needed.
        model.model.get_decoder()(input_ids=ids, use_cache=True, **{CACHE_NAME: cache})

    for layer, (keys, values) in zip(layers, donors, strict=True):
        layer.keys[:, :, -tail:], layer.values[:, :, -tail:] = keys, values
    return probe.total(len(target))
