"""A model as blending sees it, and the cache of donors' state that a prompt is prefilled into.

The decoder layers run as they are. A forward pre-hook (`install`) takes the other tokens out of the
first layer's input; each layer's attention then calls `cache.update` with the K and V of the
recomputed tokens, which land among the donors', and attends to all. `generate` sees a cache of
length 0 until that is done, so one call does partial prefill, first logits and decode.

Nothing is looked up by model name. How each layer's keys carry positions is learnt from the model
itself: the same tokens are run at shifted positions, and whatever turns the first keys into the
second is that layer's rotation (none at all in layers without positions, as Cohere2 has). Blending
is refused unless it is exact where it must be.
"""

import copy
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from dejakv.blend.offsets import OffsetCorrection, apply_corrections, corrections
from dejakv.blend.recomputed import RecomputePlan
from dejakv.blend.rope import ApplyRotary, Tables, rotate, rotate_halves, rotate_pairs, turn
from dejakv.engines.transformers.state_layout import StateLayout
from dejakv.errors import InputError, ModelError
from dejakv.models.cache_name import CACHE_NAME


class BlendLayer(DynamicLayer):
    """K and V of one layer, `[batch, kv_heads, tokens, head_dim]`.

    Keys are at this prompt's positions already.
    """

    keys: Any
    values: Any

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.tokens = values.shape[-2]
        self.dtype, self.device, self.is_initialized = values.dtype, values.device, True
        self.pending = True
        self.rows: Tensor | None = None
        self.offsets: list[OffsetCorrection] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Put the recomputed tokens among the donors' at the first call; append at later ones."""
        if not self.pending:
            return super().update(key_states, value_states, *args, **kwargs)
        self.pending = False
        # Every token is recomputed: nothing of the donors is left.
        if self.rows is None:
            self.keys, self.values = key_states, value_states
        else:
            # Before the computed rows land here: offsets are their differences from the donors'.
            apply_corrections(self.keys, key_states, self.offsets)
            apply_corrections(self.values, value_states, self.offsets)
            self.keys.index_copy_(2, self.rows, key_states)
            self.values.index_copy_(2, self.rows, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return 0 before the prefill, so that `generate` passes the whole prompt."""
        return 0 if self.pending else super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the sizes of a mask over the whole prompt before the prefill."""
        return (query_length, 0) if self.pending else super().get_mask_sizes(query_length)

    def widen(self, batch: int) -> None:
        """Copy the rows for beams or several samples of one prompt."""
        self.keys = self.keys.expand(batch, -1, -1, -1).contiguous()
        self.values = self.values.expand(batch, -1, -1, -1).contiguous()


class BlendCache(Cache):
    """Donors' state, for one prefill of exactly the planned tokens, then ordinary decoding.

    It serves a single prompt once.

    Attributes
    ----------
    rows : Tensor or None
        The recomputed tokens, ascending; None for all.
    inside : int
        The layer that runs. Hooks of a second engine on the same model leave it alone.
    """

    def __init__(self, layers: Sequence[BlendLayer], plan: RecomputePlan) -> None:
        super().__init__(layers=list(layers))
        self.blends: list[Any] = list(layers)
        self.tokens = layers[0].tokens
        self.plan = plan
        self.rows: Tensor | None = plan.tokens if len(plan.tokens) < self.tokens else None
        self.inside = -1
        self._masks: dict[int, tuple[Tensor | None, Tensor]] = {}

    @property
    def recomputed(self) -> int:
        """Number of tokens that each layer computes."""
        return self.tokens if self.rows is None else len(self.rows)

    @property
    def pending(self) -> bool:
        """Whether the prefill is not done yet."""
        return self.blends[-1].pending

    def enter(
        self, index: int, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return a decoder layer's input and its arguments for the recomputed tokens.

        Parameters
        ----------
        index : int
            Number of the layer.
        hidden : Tensor, shape [batch, tokens, hidden]
            The layer's input: at the first layer all tokens, later the recomputed ones.
        kwargs : dict[str, Any]
            The model's own arguments for all tokens: tables, position ids, mask.

        Raises
        ------
        InputError
            The cache served a prefill already, or the prompt is not the planned one.
        """
        # Layers are entered in order: one that comes again is of a second prefill.
        if self.inside >= index:
            raise InputError("a blend cache serves one prefill: make a new one for each request")
        self.inside, rows = index, self.rows

        if index == 0:
            self._begin(hidden)
            if rows is not None:
                hidden = hidden.index_select(1, rows)
        elif rows is not None and (last := hidden.shape[1]) < len(rows):
            # Where layers share the KV of earlier ones, a model may go on with its last tokens
            # alone. Its arguments are theirs already.
            if last > 1 and int(rows[-last]) != self.tokens - last:
                raise InputError(
                    f"logits of {last} tokens are asked for, of which the blend recomputes fewer: "
                    "ask for those of the last one"
                )
            return hidden, kwargs
        return hidden, kwargs if rows is None else self._for_rows(kwargs, rows)

    def rows_of(self, argument: Any) -> Any:
        """Return the recomputed tokens' part of a layer's further input; others as they are."""
        has_tokens = isinstance(argument, Tensor) and argument.dim() == 3
        if self.rows is None or not has_tokens or argument.shape[1] != self.tokens:
            return argument
        return argument.index_select(1, self.rows)

    def _begin(self, hidden: Tensor) -> None:
        """Check that the planned prompt comes, and set what each layer recomputes."""
        if hidden.shape[1] != self.tokens:
            raise InputError(
                f"the cache was planned for {self.tokens} tokens, but {hidden.shape[1]} came: pass "
                "the whole prompt, "
                "without chunked prefill"
            )
        if hidden.shape[0] > 1:
            if not bool((hidden == hidden[:1]).all()):
                raise InputError(
                    "a batch of different prompts cannot be blended: run them one by one"
                )
            # All rows are one prompt: beams, or several samples.
            for layer in self.blends:
                layer.widen(hidden.shape[0])

        moves = self.rows is not None and self.plan.runs is not None
        offsets = corrections(self.plan.runs, self.rows, self.plan.changed) if moves else []  # pyright: ignore

        for index, layer in enumerate(self.blends):
            layer.rows = self.rows
            # The first layer's K and V depend on the token alone.
            layer.offsets = offsets if index else []

    def _for_rows(self, kwargs: dict[str, Any], rows: Tensor) -> dict[str, Any]:
        """Return the model's arguments for the recomputed tokens.

        They need an explicit mask: without one, SDPA takes the queries for the first positions and
        cuts K and V short.
        """
        row_kwargs = dict(kwargs)
        tables = kwargs["position_embeddings"]
        row_kwargs["position_embeddings"] = (
            # Some models have one table of complex numbers.
            tables.index_select(-2, rows)
            if isinstance(tables, Tensor)
            else tuple(table.index_select(-2, rows) for table in tables)
        )

        if kwargs.get("position_ids") is not None:
            row_kwargs["position_ids"] = kwargs["position_ids"].index_select(-1, rows)
        row_kwargs["attention_mask"] = self._mask(kwargs.get("attention_mask"), rows)
        return row_kwargs

    def _mask(self, mask: Tensor | None, rows: Tensor) -> Tensor:
        # Layers of one kind share a mask object; a model with sliding and full layers alternates
        # between two.
        cached_mask = self._masks.get(id(mask))
        # Compared by identity too: the id of a freed mask may come again.
        if cached_mask is not None and cached_mask[0] is mask:
            return cached_mask[1]

        if mask is None:
            row_mask = (torch.arange(self.tokens, device=rows.device)[None] <= rows[:, None])[
                None, None
            ]
        elif mask.dim() == 4:
            self._refuse_padding(mask)
            row_mask = mask.index_select(2, rows)
        else:
            raise InputError(
                "blend needs the attention implementation 'sdpa' or 'eager': load the model with "
                "one of them"
            )

        self._masks[id(mask)] = (mask, row_mask)
        return row_mask

    def _refuse_padding(self, mask: Tensor) -> None:
        """Refuse padding, which shifts the positions that donors' keys rely on.

        A token that cannot see itself is padding.
        """
        diagonal = mask.diagonal(dim1=-2, dim2=-1)
        # An additive mask hides a token by a large negative number.
        seen = diagonal if diagonal.dtype == torch.bool else diagonal >= 0
        if not bool(seen.all()):
            raise InputError(
                "a prompt with padding cannot be blended: run each prompt of the batch alone, "
                "without padding"
            )


def install(layers: Sequence[nn.Module]) -> None:
    """Put the hooks on a model's decoder layers.

    They do nothing without a pending `BlendCache` of these very layers, and replace no class,
    function or method.
    """
    for index, layer in enumerate(layers):

        def hook(
            _module: nn.Module, args: tuple, kwargs: dict[str, Any], index: int = index
        ) -> Any:
            cache = kwargs.get(CACHE_NAME)
            if not isinstance(cache, BlendCache) or cache.inside == index:
                return None
            # The last layers may attend to the K and V of earlier ones, and have none to wait for.
            if not cache.pending and index < cache.inside:
                return None
            # Positional in some models, by name in others.
            hidden = args[0] if args else kwargs["hidden_states"]
            hidden, row_kwargs = cache.enter(index, hidden, kwargs)
            if args:
                return (hidden, *(cache.rows_of(argument) for argument in args[1:])), row_kwargs
            return (), {**row_kwargs, "hidden_states": hidden}

        layer.register_forward_pre_hook(hook, with_kwargs=True)


RECURRENT = (
    "blend cannot move recurrent state, which is that of one place in one prompt; use exact reuse"
)
"""Why a model with fixed state is not blended."""
INDEXED = (
    "blend cannot fill the index of keys by which this model chooses what it attends to; use exact "
    "reuse"
)
"""Why a model with an index of keys is not blended."""
TEMPERED = (
    "blend cannot tell recomputed tokens' positions to this model's attention temperature tuning, "
    "which counts tokens; use exact reuse"
)
"""Why a model that scales its queries by the number of tokens before them is not blended."""
FIXED = {"default", "linear", "yarn", "llama3", "proportional"}
"""Kinds of rotary tables that do not depend on a prompt's length."""
TOKENS, SHIFT = 24, 7
"""Tokens of the trial, and the positions by which they are shifted."""


@dataclass(frozen=True)
class KeyMover:
    """How one layer's keys move to other positions.

    Attributes
    ----------
    apply : ApplyRotary
        The rotary function of the model's own module.
    partial : bool
        Whether only a part of each head turns; see `rope.rotate`.
    kind : str or None
        Type of layer that the tables are made for; None where all layers share them.
    """

    apply: ApplyRotary
    partial: bool = False
    kind: str | None = None


@dataclass
class BlendModel:
    """The parts of a model that a blend works on.

    Attributes
    ----------
    layers : list[Module]
        The decoder layers that run.
    rotary : Module
        The decoder's rotary embedding.
    movers : list[KeyMover | None]
        How each layer's keys move; None for a layer whose keys carry no position.
    value_movers : list[KeyMover | None]
        Likewise of values. A model with latent attention keeps the rotated part of its keys there.
    layout : StateLayout or None
        What the layers keep, if that is stored by a layout; see `ModelCapabilities`.
    """

    model: Any
    layers: list[Any]
    rotary: Any
    movers: list[KeyMover | None]
    value_movers: list[KeyMover | None] = field(default_factory=list["KeyMover | None"])
    layout: StateLayout | None = None
    _tables: dict[tuple[str | None, int], Tables] = field(default_factory=dict, repr=False)

    @property
    def fixed(self) -> bool:
        """Whether a position is rotated alike in prompts of any length."""
        kinds = getattr(self.rotary, "rope_type", "default")
        # A dictionary names a kind for each type of layer.
        return set(kinds.values() if isinstance(kinds, dict) else [kinds]) <= FIXED

    def tables(self, length: int, kind: str | None) -> Tables:
        """Return cos and sin, `[1, >= length, dim]` float32, as in a prompt of `length` tokens.

        Up to 8 pairs are kept.
        """
        # Powers of two: prompts of many lengths share a few tables.
        rows = max(512, 1 << (length - 1).bit_length()) if self.fixed else length
        cached_tables = self._tables.get((kind, rows))
        if cached_tables is None:
            if len(self._tables) >= 8:
                self._tables.pop(next(iter(self._tables)))
            cached_tables = self._tables[kind, rows] = self._make_tables(rows, kind)
        return cached_tables

    def _make_tables(self, length: int, kind: str | None) -> Tables:
        device = self.model.device
        extra = (kind,) if kind is not None else ()
        # Tensors made in inference mode could not be used, or changed in place, outside of it.
        with torch.inference_mode(False), torch.no_grad():
            # A copy that has seen no prompt: some rotary modules remember the longest one.
            rotary = copy.deepcopy(self.rotary)
            _forget(rotary)
            probe = torch.zeros(1, 1, 1, dtype=torch.float32, device=device)
            tables = rotary(probe, torch.arange(length, device=device)[None], *extra)
        if isinstance(tables, Tensor):
            return tables.real.float(), tables.imag.float()
        cos, sin = tables
        return cos.float(), sin.float()

    def fits(self, state: Tensor) -> bool:
        """Tell whether a stored state has the shape of this model's."""
        if state.dim() != 5:
            return False
        if self.layout is None:
            return state.shape[1] == len(self.movers)
        return state.shape[:3] == (1, 1, 1) and state.shape[4] == self.layout.width

    def layer_states(self, state: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of each layer, `[kv_heads, tokens, head_dim]`, in stored state."""
        if self.layout is None:
            return list(zip(state[0], state[1], strict=True))
        views = {(part.layer, part.name): view for part, view in self.layout.views(state)}
        # A copy: parts of rows that lie apart would be gathered by every layer anew.
        return [
            (views[layer, "keys"].contiguous(), views[layer, "values"].contiguous())
            for layer in range(len(self.movers))
        ]

    def moving(self, state: Tensor) -> list[tuple[Tensor, list[KeyMover | None]]]:
        """Return what carries positions in stored state: views, and how their layers move.

        The views are `[layers, kv_heads, tokens, head_dim]`.
        """
        if self.layout is None:
            return [(state[0], self.movers)]
        places: dict[tuple[KeyMover, tuple[int, ...]], list[int]] = {}
        place = 0
        for part in self.layout.growing:
            movers = self.movers if part.name == "keys" else self.value_movers
            mover = movers[part.layer]
            if mover is not None:
                places.setdefault((mover, part.shape), []).append(place)
            place += part.numbers

        moving: list[tuple[Tensor, list[KeyMover | None]]] = []
        for (mover, (heads, size)), starts in places.items():
            steps = {after - before for before, after in pairwise(starts)}
            # At equal distances all layers are one view, and each apart otherwise.
            groups = [starts] if len(steps) < 2 else [[start] for start in starts]
            for group in groups:
                step = next(iter(steps)) if len(group) > 1 else 0
                view = state.as_strided(
                    (len(group), heads, state.shape[3], size),
                    (step, size, state.shape[4], 1),
                    state.storage_offset() + group[0],
                )
                moving.append((view, [mover] * len(group)))
        return moving

    def move(
        self,
        keys: Tensor,
        target: Tensor,
        source: Tensor,
        source_length: int,
        target_length: int,
        movers: Sequence[KeyMover | None] | None = None,
    ) -> None:
        """Turn keys from positions `source` to positions `target`, in place.

        Parameters
        ----------
        keys : Tensor, shape [layers, kv_heads, tokens, head_dim]
            Keys of layers.
        target, source : Tensor, shape [tokens]
            Positions after and before.
        source_length, target_length : int
            Tokens of the prompts: tables may depend on them (dynamic NTK, longrope).
        movers : Sequence[KeyMover or None], optional
            How the layers move. None for keys of all layers.
        """
        same = self.fixed or source_length == target_length
        if not len(keys) or (same and torch.equal(target, source)):
            return

        movers = self.movers if movers is None else movers
        for mover in {m for m in movers if m is not None}:
            # Layers that rotate alike are turned together.
            layer_indices = [i for i, m in enumerate(movers) if m == mover]
            cos, sin = self.tables(source_length, mover.kind)
            old = (cos[:, source], sin[:, source])
            cos, sin = self.tables(target_length, mover.kind)
            tables = turn((cos[:, target], sin[:, target]), old)
            if len(layer_indices) == len(movers):
                rotate(mover.apply, keys, tables, partial=mover.partial, out=keys)
            else:
                # An index makes a copy, which cannot be written in place.
                keys[layer_indices] = rotate(
                    mover.apply, keys[layer_indices], tables, partial=mover.partial
                )


def _forget(rotary: Any) -> None:
    """Set a copied rotary module back to its state before any prompt."""
    for name, value in list(rotary.named_buffers(recurse=False)):
        initial_freq = getattr(rotary, name.replace("inv_freq", "original_inv_freq"), None)
        if (
            name.endswith("inv_freq")
            and "original" not in name
            and isinstance(initial_freq, Tensor)
        ):
            value.data = initial_freq.clone()

    original = getattr(rotary, "original_max_seq_len", None)
    if isinstance(original, int) and isinstance(getattr(rotary, "max_seq_len_cached", None), int):
        rotary.max_seq_len_cached = original


def _parts_of(model: Any, layout: StateLayout | None) -> BlendModel:
    """Return the parts of a model that a blend works with; its movers are still to be learnt.

    Raises
    ------
    ModelError
        A part is missing; the message names it.
    """
    name = type(model).__name__
    if layout is not None and layout.fixed:
        raise ModelError(RECURRENT)
    if layout is not None and not {state.name for state in layout.growing} <= {"keys", "values"}:
        raise ModelError(INDEXED)
    attention = getattr(model.config, "_attn_implementation", None)
    text = getattr(model.config, "get_text_config", lambda: model.config)()
    # An image-text model's language model may be set to another implementation.
    attention = getattr(text, "_attn_implementation", attention)
    if attention not in ("sdpa", "eager"):
        raise ModelError(
            f"blend needs the attention implementation 'sdpa' or 'eager', {name} was loaded with "
            f"{attention!r}: "
            "other implementations cannot express rows that are not in a row; load it with --attn "
            "sdpa"
        )

    body = model.get_decoder() if hasattr(model, "get_decoder") else None
    layers = getattr(body, "layers", None)
    rotary = getattr(body, "rotary_emb", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(rotary, nn.Module):
        raise ModelError(
            f"blend cannot work with {name}: its decoder has no list of layers with a rotary "
            "embedding; use exact"
        )
    if getattr(text, "attn_temperature_tuning", False):
        raise ModelError(TEMPERED)

    # The list may hold more layers than the model runs.
    used = list(layers[: text.num_hidden_layers])
    # The one of the model's own module: modules differ in how they pair a key's numbers.
    module = sys.modules[type(used[0]).__module__]
    apply = getattr(module, "apply_rotary_pos_emb", None)
    if apply is None and hasattr(module, "apply_rotary_pos_emb_interleave"):
        # It leaves keys in halves, as `rotate_halves` takes them.
        apply = rotate_halves
    elif apply is None and hasattr(module, "apply_rotary_emb"):
        apply = rotate_pairs
    elif apply is not None and list(inspect.signature(apply).parameters)[1:2] == ["cos"]:
        # Of one tensor and not of two.
        apply = partial(_rotate_keys, apply)
    if apply is None:
        raise ModelError(
            f"blend cannot work with {name}: its module has no rotary function to move keys with; "
            "use exact"
        )

    by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
    kinds = list(text.layer_types) if by_kind else [None] * len(used)
    movers: list[KeyMover | None] = [KeyMover(apply, kind=kind) for kind in kinds]
    return BlendModel(model, used, rotary, movers, list(movers), layout)


def _rotate_keys(
    apply: Any, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return queries, apply(keys, cos, sin)


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest relative error (root mean square) of a layer or of the logits.

    In bfloat16 the positions alone make .03 in SmolLM2's values (.3 of their spread at the worst
    number: its V has outliers); errors make .3 and more.
    """
    return 1e-3 if dtype == torch.float32 else 0.1


@torch.no_grad()
def blend_model_of(model: Any, layout: StateLayout | None = None) -> BlendModel | ModelError:
    """Try blending on a model and put its hooks on.

    Parameters
    ----------
    layout : StateLayout, optional
        Layout by which the model's state is stored, if it is by one.

    Returns
    -------
    BlendModel or ModelError
        The error says why blending would not be exact where it must be.
    """
    try:
        blend_model = _parts_of(model, layout)
        _check(model, blend_model)
    except ModelError as error:
        return error
    # A model's own code may raise anything.
    except Exception as error:
        why = str(error) or type(error).__name__
        return ModelError(f"blend cannot work with {type(model).__name__}: {why}; use exact reuse")
    return blend_model


def _check(model: Any, blend_model: BlendModel) -> None:
    """Learn how keys move, put the hooks on, and compare two trivial blends with a plain prefill.

    Raises
    ------
    ModelError
        If values depend on positions, if a layer's keys move in no known way, or if a trivial blend
        gives other logits than the plain prefill.
    """
    name = type(model).__name__
    # The same tokens each time: a model is refused always or never.
    generator = torch.Generator().manual_seed(11)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (1, TOKENS), generator=generator).to(model.device)
    positions = torch.arange(TOKENS, device=model.device)
    reference, keys, values = _prefill(model, ids, positions)
    _, shifted, shifted_values = _prefill(model, ids, positions + SHIFT)

    # As many as caches of layers: a layer may have two, and later ones may look at those of others.
    for movers in (blend_model.movers, blend_model.value_movers):
        movers[len(keys) :] = movers[-1:] * (len(keys) - len(movers))
    # Values carry no position, but of latent attention: there they are the rotated keys.
    for index, (before, after) in enumerate(zip(values, shifted_values, strict=True)):
        mover = blend_model.value_movers[index]
        best, fits = _best_mover(blend_model, (None, mover), before, after, positions)
        if not fits or (best is not None and blend_model.layout is None):
            raise ModelError(
                f"blend cannot work with {name}: its state depends on absolute positions; use "
                "exact reuse"
            )
        blend_model.value_movers[index] = best

    for index, (before, after) in enumerate(zip(keys, shifted, strict=True)):
        mover = blend_model.movers[index]
        assert mover is not None
        # Keys without positions stay as they are.
        trials = (mover, replace(mover, partial=True), None)
        best, fits = _best_mover(blend_model, trials, before, after, positions)
        if not fits:
            raise ModelError(
                f"blend cannot work with {name}: the keys of layer {index} do not move with its "
                "rotary; use exact reuse"
            )
        blend_model.movers[index] = best

    # The trial needs the hooks. Without a BlendCache they do nothing.
    install(blend_model.layers)

    for share, case in ((1.0, "recomputing every row"), (0.0, "an identical donor")):
        got = _blend(model, ids, keys, values, share)
        limit = tolerance(model.dtype)
        if _relative_error(got, reference) > limit:
            raise ModelError(
                f"blend cannot work with {name}: {case} gives other logits than plain prefill "
                f"(relative difference {_relative_error(got, reference):.2g}, {limit:g} is "
                "allowed); use exact reuse"
            )


def _best_mover(
    blend_model: BlendModel,
    trials: Sequence[KeyMover | None],
    before: Tensor,
    after: Tensor,
    positions: Tensor,
) -> tuple[KeyMover | None, bool]:
    """Return the way that best turns state at `positions` into that `SHIFT` later.

    Not the first within tolerance: in 16 bits a wrong one may be, where slow pairs hardly turn.

    Parameters
    ----------
    before, after : Tensor, shape [kv_heads, tokens, head_dim]
        One layer's state.

    Returns
    -------
    best : KeyMover or None
        The way of the least error, the first of equal ones.
    fits : bool
        Whether its error is within tolerance.
    """
    best, least = trials[0], float("inf")
    for trial in trials:
        moved = before[None].clone()
        try:
            blend_model.move(
                moved, positions + SHIFT, positions, TOKENS, TOKENS + SHIFT, movers=[trial]
            )
        # A rotary function may want other arguments, or tables of another width.
        except (RuntimeError, TypeError, ValueError):
            continue
        error = _relative_error(moved, after[None])
        if error < least:
            best, least = trial, error
    return best, least <= tolerance(blend_model.model.dtype)


def _prefill(
    model: Any, ids: Tensor, positions: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the last logits, and each layer's keys and values, `[kv_heads, tokens, head_dim]`."""
    # This cache keeps every token, also in sliding-window layers.
    cache = Cache(layer_class_to_replicate=DynamicLayer)
    out = model(input_ids=ids, position_ids=positions[None], use_cache=True, **{CACHE_NAME: cache})
    layers: list[Any] = list(cache.layers)
    keys, values = ([getattr(layer, kind)[0] for layer in layers] for kind in ("keys", "values"))
    return out.logits[:, -1], keys, values


def _blend(
    model: Any, ids: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], share: float
) -> Tensor:
    forced = torch.zeros(TOKENS, dtype=torch.bool, device=ids.device)
    # The last row gives the logits.
    forced[-1] = True
    plan = RecomputePlan(share, torch.ones(TOKENS, device=ids.device), forced)
    layers = [
        BlendLayer(k[None].clone(), v[None].clone()) for k, v in zip(keys, values, strict=True)
    ]
    cache = BlendCache(layers, plan)
    return model(input_ids=ids, use_cache=True, **{CACHE_NAME: cache}).logits[:, -1]


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the difference over that of `expected`.

    Of several layers (the first axis) it is the worst.
    """
    if actual.shape != expected.shape:
        return float("inf")
    error = (actual.float() - expected.float()).flatten(1).square().mean(1)
    return float(
        (error / expected.float().flatten(1).square().mean(1).clamp_min(1e-18)).max().sqrt()
    )
