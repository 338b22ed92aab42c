"""Asks a model, once, whether blending is exact on it where it must be. Blending is refused unless it is."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from dejakv.engines.transformers.blend_cache import BlendCache, BlendLayer, Peeked
from dejakv.engines.transformers.blend_hooks import install
from dejakv.engines.transformers.blend_seams import Mover, Seams, find_seams
from dejakv.errors import ModelError
from dejakv.reuse.rows import RowPlan
from dejakv.reuse.schedule import constant
from dejakv.reuse.selector import Selector

_SEAMS = "_dejakv_blend_seams"
TOKENS, SHIFT = 24, 7


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative error, root mean square, of a layer or of the logits. In bfloat16 the positions alone make .03 in
    SmolLM2's values (.3 of their spread at the worst number: its V has outliers); what is wrong makes .3 and more."""
    return 1e-3 if dtype == torch.float32 else 0.1


@torch.no_grad()
def seams_of(model: Any) -> Seams:
    """The model's seams, checked and with hooks installed; later calls hand back the same.

    Raises: ModelError with the reason if blending would not be exact where it must be.
    """
    held = getattr(model, _SEAMS, None)
    if isinstance(held, Seams):
        return held
    if isinstance(held, ModelError):
        raise held
    try:
        seams = find_seams(model)
        try:
            _check(model, seams)
        except (RuntimeError, TypeError, KeyError, AttributeError, ValueError, IndexError) as error:
            raise ModelError(f"blend cannot work with {type(model).__name__}: {error}; use exact reuse") from error
    except ModelError as error:
        object.__setattr__(model, _SEAMS, error)
        raise
    object.__setattr__(model, _SEAMS, seams)
    return seams


def plain_cache() -> Cache:
    """A cache that keeps every token, also in sliding-window layers (a donor must have them all)."""
    return Cache(layer_class_to_replicate=DynamicLayer)


def _check(model: Any, seams: Seams) -> None:
    name = type(model).__name__
    generator = torch.Generator().manual_seed(11)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (1, TOKENS), generator=generator).to(model.device)
    here = torch.arange(TOKENS, device=model.device)
    reference, keys, values = _prefill(model, ids, here)
    _, shifted, shifted_values = _prefill(model, ids, here + SHIFT)
    limit = tolerance(model.dtype)
    if _far(values, shifted_values) > limit:
        raise ModelError(f"blend cannot work with {name}: its state depends on absolute positions; use exact reuse")
    learn_movers(seams, keys, shifted, here, limit, name)
    install(model, seams)
    seams.direct = _values_are_direct(model, seams, ids, values, limit)
    for share, what in ((1.0, "recomputing every row"), (0.0, "an identical donor")):
        got = _blend(model, seams, ids, keys, values, share)
        if _far(got, reference) > limit:
            raise ModelError(
                f"blend cannot work with {name}: {what} gives other logits than plain prefill "
                f"(relative difference {_far(got, reference):.2g}, {limit:g} is allowed); use exact reuse"
            )


def learn_movers(seams: Seams, keys: Tensor, shifted: Tensor, here: Tensor, limit: float, name: str) -> None:
    """Finds for each layer what turns its keys at `here` into those at `here + SHIFT`. Raises ModelError if nothing does."""
    for index, mover in enumerate(seams.movers):
        assert mover is not None
        found: list[Mover | None] = []
        for trial in (replace(mover, partial=False), replace(mover, partial=True), None):
            lone = Seams(seams.layers, seams.rotary, [trial])
            moved = keys[index : index + 1].clone()
            try:
                lone.move(moved, here + SHIFT, here, TOKENS, TOKENS + SHIFT)
            except (RuntimeError, ValueError):
                continue
            if _far(moved, shifted[index : index + 1]) <= limit:
                found = [trial]
                break
        if not found:
            raise ModelError(
                f"blend cannot work with {name}: the keys of layer {index} do not move with its rotary; use exact reuse"
            )
        seams.movers[index] = found[0]


def _prefill(model: Any, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    cache = plain_cache()
    out = model(input_ids=ids, position_ids=positions[None], past_key_values=cache, use_cache=True)
    layers: list[Any] = list(cache.layers)
    keys = torch.stack([layer.keys[0] for layer in layers])
    return out.logits[:, -1], keys, torch.stack([layer.values[0] for layer in layers])


def _blend(model: Any, seams: Seams, ids: Tensor, keys: Tensor, values: Tensor, share: float) -> Tensor:
    forced = torch.zeros(TOKENS, dtype=torch.bool, device=ids.device)
    forced[-1] = True
    plan = RowPlan(
        constant(len(seams.layers), share), Selector("similarity"), torch.ones(TOKENS, device=ids.device), forced
    )
    layers = [BlendLayer(k[None].clone(), v[None].clone()) for k, v in zip(keys, values, strict=True)]
    cache = BlendCache(layers, plan, seams)
    return model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]


def _values_are_direct(model: Any, seams: Seams, ids: Tensor, values: Tensor, limit: float) -> bool:
    """Whether `v_proj(input_layernorm(hidden))` is what every layer caches as V."""
    inputs: dict[int, Tensor] = {}
    handles = [
        layer.register_forward_pre_hook(
            lambda _module, args, kwargs, i=i: inputs.__setitem__(i, args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        for i, layer in enumerate(seams.layers)
    ]
    try:
        model(input_ids=ids, past_key_values=plain_cache(), use_cache=True)
    finally:
        for handle in handles:
            handle.remove()
    trial = Seams(seams.layers, seams.rotary, seams.movers, direct=True)
    try:
        made = [trial.values(i, layer, inputs[i], values) for i, layer in enumerate(seams.layers)]
        return all(v is not None and _far(v[0], values[i]) <= limit for i, v in enumerate(made))
    except (AttributeError, RuntimeError):
        return False


def _far(one: Tensor, other: Tensor) -> float:
    """Root mean square of the difference over that of the second; of several layers (the first axis) the worst."""
    if one.shape != other.shape:
        return float("inf")
    error = (one.float() - other.float()).flatten(1).square().mean(1)
    return float((error / other.float().flatten(1).square().mean(1).clamp_min(1e-18)).max().sqrt())


__all__ = ["Peeked", "plain_cache", "seams_of", "tolerance"]
