"""A prompt's KV as one framework-free tensor, and back into a cache that a model continues from."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from dejakv.errors import ModelError
from dejakv.store.base import Tensor

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_BITS = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16}


def plain_cache() -> Cache:
    """An empty cache that keeps every token of every layer, also where the model attends through a sliding window.

    The default cache of a sliding-window model forgets what left the window, and a prompt's state could not be taken
    from it. The window itself is in the mask, so the output is the same.
    """
    return DynamicCache()


def filled_cache(state: Tensor, tokens: int, device: torch.device, dtype: torch.dtype) -> Cache:
    """A cache that already holds the first `tokens` tokens of a stacked state `[2, layers, heads, n, head_dim]`.

    On the CPU nothing is copied here: the layers view the state's memory (a memory map is read page by page when a layer
    first attends), and the first new token copies it. Raises: ModelError if the state is not of this dtype or shape.
    """
    if len(state.shape) != 5 or state.shape[0] != 2 or state.shape[3] < tokens:
        raise ModelError(
            f"a state of shape {state.shape} is not [2, layers, heads, >={tokens} tokens, head_dim]: it was stored by "
            "something else; clear the cache directory"
        )
    if state.dtype != _NAMES.get(dtype):
        raise ModelError(
            f"a state in {state.dtype} cannot continue in {dtype}: load the model in the dtype it was stored in"
        )
    stacked = to_torch(state)[:, :, :, :tokens]
    if device.type != "cpu":
        stacked = stacked.contiguous().to(device, non_blocking=True)
    cache = DynamicCache()
    layers: list[Any] = [
        _filled_layer(stacked[0, index : index + 1], stacked[1, index : index + 1]) for index in range(stacked.shape[1])
    ]
    cache.layers = layers
    return cache


def captured(cache: Cache, tokens: int) -> Tensor | None:
    """The state of the first `tokens` tokens, `[2, layers, heads, tokens, head_dim]` on the CPU; a copy.

    None if layers differ in shape, dtype or kind, so that no single tensor holds them.
    """
    layers: list[Any] = list(cache.layers)
    if any(type(layer) is not DynamicLayer or not layer.is_initialized for layer in layers):
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
    if parts[0].dtype not in _NAMES:
        return None
    return to_numpy(torch.stack(parts).unflatten(0, (2, len(layers))))


def to_torch(tensor: Tensor) -> torch.Tensor:
    """The same memory as a CPU tensor, never to be written to (it may be a read-only map, or another request's)."""
    data = _viewable(np.asarray(tensor.data))
    if tensor.dtype not in _BITS or data.dtype != _BITS[tensor.dtype]:
        raise ModelError(f"a state of dtype {tensor.dtype} held as {data.dtype} is unknown: clear the cache directory")
    out = torch.from_numpy(data.view(np.int16) if tensor.dtype == "BF16" else data)
    return out.view(torch.bfloat16) if tensor.dtype == "BF16" else out


def to_numpy(tensor: torch.Tensor) -> Tensor:
    """The values on the CPU as a contiguous array; bfloat16 as uint16 bit patterns."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise ModelError(f"{tensor.dtype} cannot be stored: load the model in float32, bfloat16 or float16")
    plain = tensor.detach().cpu().contiguous()
    array = plain.view(torch.int16).numpy().view(np.uint16) if name == "BF16" else plain.numpy()
    return Tensor(array, name)


def _filled_layer(keys: torch.Tensor, values: torch.Tensor) -> DynamicLayer:
    layer = DynamicLayer()
    layer.keys, layer.values = keys, values
    layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
    return layer


class _Memory:
    """Another array's memory, declared writable: torch warns of read-only arrays although it only reads here."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._keep = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _viewable(array: NDArray[Any]) -> NDArray[Any]:
    return array if array.flags.writeable or array.size == 0 else np.asarray(_Memory(array))
