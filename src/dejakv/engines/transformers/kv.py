"""A prompt's KV as one framework-free tensor, and back as a cache for a model."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from dejakv.engines.tensors import DTYPE_NAMES, tensor_view, to_store
from dejakv.errors import ModelError
from dejakv.models.layout import CacheLayout
from dejakv.store.base import RawTensor

PREFILL_UNIT = 256
"""Tokens of a prefill unit in low precision.

Misses took 0 to 4% longer on SmolLM2 and a CPU; with 128 they took 7 to 22%
(docs/explanation/exactness.md).
"""


def prefill_unit_of(model: Any) -> int:
    """Return the tokens of the units in which a model's prompts are prefilled; 1 does not divide.

    In low precision an answer depends on how many rows are computed together. So hits and misses
    compute the same units.
    """
    return PREFILL_UNIT if model.dtype in (torch.bfloat16, torch.float16) else 1


def plain_cache() -> Cache:
    """Return an empty cache that keeps every token of every layer.

    The default cache of a sliding-window model forgets what left the window, and a prompt's state
    could not be taken from it. The window itself is in the mask, so the output is the same.
    """
    return DynamicCache()


def empty_cache(layout: CacheLayout | None) -> Cache:
    """Return an empty cache for a prompt of a model with this layout (`layout_of`)."""
    return layout.empty_cache() if layout is not None else plain_cache()


def filled_cache(
    states: Sequence[RawTensor],
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    into: Cache | None = None,
) -> Cache:
    """Return a cache that already holds the first `tokens` tokens of a state.

    On the CPU nothing is copied here: the layers view the parts' memory (a memory map is read page
    by page when a layer first attends), and the first new token copies it.

    Parameters
    ----------
    states : Sequence[RawTensor], each of shape [2, layers, heads, n, head_dim]
        Parts of the state that follow each other.
    into : Cache or None
        The empty cache that is filled; None for a plain one.

    Raises
    ------
    ModelError
        A part is not of this dtype or shape, or the parts hold too few tokens.
    """
    stacked: list[torch.Tensor] = []
    for state in states:
        shape = state.data.shape
        if len(shape) != 5 or shape[0] != 2:
            raise ModelError(
                f"a state of shape {shape} is not [2, layers, heads, tokens, head_dim]: it was "
                "stored by something else; "
                "clear the cache directory"
            )
        if state.dtype != DTYPE_NAMES.get(dtype):
            raise ModelError(
                f"a state in {state.dtype} cannot continue in {dtype}: load the model in the dtype "
                "it was stored in"
            )
        rows = tensor_view(state)[:, :, :, : tokens - sum(part.shape[3] for part in stacked)]
        # One block for each copy to a device; on the CPU a view is enough.
        stacked.append(
            rows if device.type == "cpu" else rows.contiguous().to(device, non_blocking=True)
        )
    if (stored_tokens := sum(part.shape[3] for part in stacked)) < tokens:
        raise ModelError(
            f"a state of {stored_tokens} tokens has not the first {tokens}: clear the cache "
            "directory"
        )

    cache = plain_cache() if into is None else into
    # Only the empty cache of a model with a layout has layers beforehand.
    if cache.layers and len(cache.layers) != stacked[0].shape[1]:
        raise ModelError(
            f"a state of {stacked[0].shape[1]} layers cannot continue in a model with the KV of "
            f"{len(cache.layers)}: it is of "
            "another model; clear the cache directory"
        )

    keys, values = ([part[kind].unsqueeze(1) for part in stacked] for kind in (0, 1))
    layers: list[Any] = [
        PartsLayer([part[layer] for part in keys], [part[layer] for part in values])
        for layer in range(stacked[0].shape[1])
    ]

    cache.layers = layers
    return cache


class PartsLayer(DynamicLayer):
    """A layer that holds `[batch, heads, tokens, head_dim]` in parts, until the first new token.

    That token copies all of them into one tensor. To join the parts of a stored state before would
    copy it twice.
    """

    def __init__(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._keys, self._values = list(keys), list(values)
        self.dtype, self.device, self.is_initialized = keys[0].dtype, keys[0].device, True

    @property
    def keys(self) -> Any:
        """Keys of all tokens in one tensor; the parts are joined at the first read."""
        return _whole(self._keys)

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._keys = [] if keys is None else [keys]

    @property
    def values(self) -> Any:
        """Values of all tokens in one tensor; the parts are joined at the first read."""
        return _whole(self._values)

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._values = [] if values is None else [values]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens and return all."""
        self._keys.append(key_states)
        self._values.append(value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the number of tokens, without joining the parts."""
        return sum(part.shape[-2] for part in self._keys)


def _whole(parts: list[torch.Tensor]) -> torch.Tensor | None:
    if len(parts) > 1:
        # In place: the layer gives up the parts, and with them their memory.
        parts[:] = [torch.cat(parts, dim=-2)]
    return parts[0] if parts else None


def copy_prefix(cache: Cache, tokens: int, into: Cache | None = None) -> Cache | None:
    """Return the first `tokens` rows as a cache of its own: `into`, or a plain one.

    Its layers view the rows, and new rows are added beside them. None if a layer has fewer rows, or
    is of another kind.
    """
    source_layers: list[Any] = list(cache.layers)
    if any(
        not isinstance(layer, DynamicLayer)
        # Keys and values are not all of its state.
        or hasattr(layer, "recurrent_states")
        or hasattr(layer, "indexer_keys")
        or layer.keys is None
        or layer.keys.shape[-2] < tokens
        for layer in source_layers
    ):
        return None

    prefix_cache: Any = DynamicCache() if into is None else into
    prefix_cache.layers = [
        PartsLayer([layer.keys[:1, :, :tokens]], [layer.values[:1, :, :tokens]])
        for layer in source_layers
    ]
    return prefix_cache


def stacked_state(cache: Cache, tokens: int) -> RawTensor | None:
    """Copy the state of the first `tokens` tokens to the CPU.

    It is `[2, layers, heads, tokens, head_dim]`. None if layers differ in shape, dtype or kind, so
    that no single tensor holds them.
    """
    layers: list[Any] = list(cache.layers)
    # Exact types: a subclass may forget tokens, as sliding windows do.
    if not layers or any(
        type(layer) not in (DynamicLayer, PartsLayer) or not layer.is_initialized
        for layer in layers
    ):
        return None

    parts = [
        part[0, :, :tokens]
        for kind in ("keys", "values")
        for layer in layers
        if (part := getattr(layer, kind)) is not None
    ]
    if len(parts) != 2 * len(layers) or parts[0].shape[1] != tokens:
        return None
    if any(part.shape != parts[0].shape or part.dtype != parts[0].dtype for part in parts):
        return None
    if parts[0].dtype not in DTYPE_NAMES:
        return None
    return to_store(torch.stack(parts).unflatten(0, (2, len(layers))).detach().cpu())
