"""Embeddings as framework-free tensors and back: files contain bytes, a dtype and a shape, never objects."""

import importlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dejakv.encoder_cache.tensors import is_torch
from dejakv.errors import InputError
from dejakv.store.base import Tensor

_STORED = {"float32": "F32", "float16": "F16", "uint8": "U8", "int64": "I64"}


def to_raw(embedding: Any) -> tuple[Tensor, dict[str, Any]]:
    """The tensor on the CPU, and the description from which `from_raw` restores the same kind of embedding.

    Dtypes without a name in the store's files are written as their bytes. Copies embeddings that are not on the CPU.
    """
    if is_torch(embedding):
        torch = importlib.import_module("torch")
        tensor = embedding.detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        described = {"framework": "torch", "dtype": dtype, "shape": list(tensor.shape)}
        if dtype == "bfloat16":
            return Tensor(tensor.view(torch.uint16).numpy(), "BF16"), described
        if dtype in _STORED:
            return Tensor(tensor.numpy(), _STORED[dtype]), described
        return Tensor(tensor.reshape(-1).view(torch.uint8).numpy(), "U8"), described
    array = np.ascontiguousarray(embedding)
    described = {"framework": "numpy", "dtype": array.dtype.str, "shape": list(array.shape)}
    if array.dtype.isnative and array.dtype.name in _STORED:
        return Tensor(array, _STORED[array.dtype.name]), described
    return Tensor(array.reshape(-1).view(np.uint8), "U8"), described


def from_raw(tensor: Tensor, described: Mapping[str, Any]) -> Any:
    """The embedding on the CPU, in its own memory. Imports torch if the embedding was a torch tensor.

    Raises InputError if the description does not fit the tensor.
    """
    try:
        framework, dtype, shape = described["framework"], described["dtype"], [int(size) for size in described["shape"]]
        flat = np.array(tensor.data).reshape(-1).view(np.uint8)
        if framework == "torch":
            torch = importlib.import_module("torch")
            kind = getattr(torch, dtype)
            if not isinstance(kind, torch.dtype) or flat.nbytes != math.prod(shape) * kind.itemsize:
                raise ValueError(f"{flat.nbytes} bytes do not make {dtype} of shape {shape}")
            return torch.from_numpy(flat).view(kind).reshape(shape)
        kind = np.dtype(dtype)
        if framework != "numpy" or kind.hasobject or flat.nbytes != math.prod(shape) * kind.itemsize:
            raise ValueError(f"{flat.nbytes} bytes do not make {dtype} of shape {shape} of {framework}")
        return flat.view(kind).reshape(shape)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"stored encoder output does not fit its description ({error}): delete it") from error
