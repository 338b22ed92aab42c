"""Embeddings of any framework: numpy arrays and torch tensors, told apart without importing torch, and as bytes for files."""

import importlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import InputError
from dejakv.store.base import Tensor


def is_torch(embedding: Any) -> bool:
    """Whether it is a torch tensor (anything with an untyped storage counts)."""
    return hasattr(embedding, "untyped_storage")


def size_of(embedding: Any) -> int:
    """The bytes of the elements: their number times the element size."""
    nbytes = getattr(embedding, "nbytes", None)
    if nbytes is None:
        nbytes = embedding.element_size() * embedding.nelement()
    return int(nbytes)


def owned(embedding: Any) -> Any:
    """The embedding alone, without an autograd graph or the storage of a larger batch that it would keep alive.

    A slice of a batch's output keeps the whole batch in memory, which no byte budget would count. Compact, plain
    embeddings come back as they are; others are copied once.
    """
    if is_torch(embedding):
        if embedding.requires_grad:
            embedding = embedding.detach()
        return embedding.clone() if embedding.untyped_storage().nbytes() > embedding.nbytes else embedding
    array = cast("NDArray[Any]", embedding)
    base = array.base
    return array.copy() if base is not None and int(getattr(base, "nbytes", 0)) > array.nbytes else array


def check_embedding(embedding: Any, *, finite: bool = True) -> None:
    """Raises InputError unless it is a 2-D or 3-D array with elements and, if `finite`, without NaN or infinity."""
    shape = getattr(embedding, "shape", None)
    if shape is None or not (is_torch(embedding) or isinstance(embedding, np.ndarray)):
        raise InputError(
            f"an embedding must be a numpy array or a torch tensor, not {type(embedding).__name__}: "
            "stack the outputs of several levels into one tensor [levels, tokens, hidden]"
        )
    if len(shape) not in (2, 3):
        raise InputError(
            f"an embedding must be [tokens, hidden] or [levels, tokens, hidden], not of shape {tuple(shape)}: "
            "store one picture at a time"
        )
    if 0 in tuple(shape):
        raise InputError(f"the embedding of shape {tuple(shape)} has no elements: check the encoder's input")
    if finite and not _is_finite(embedding):
        raise InputError(
            "the embedding has NaN or infinite values and is not kept, because every request with this picture would get "
            "it: check the encoder's weights and dtype (float16 overflows), or build the cache with check_finite=False"
        )


def _is_finite(embedding: Any) -> bool:
    if is_torch(embedding):
        return not embedding.is_floating_point() or bool(embedding.isfinite().all())
    array = cast("NDArray[Any]", embedding)
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def describe(embedding: Any) -> dict[str, Any]:
    """From which `from_raw` restores the same kind of embedding."""
    shape = [int(size) for size in embedding.shape]
    if is_torch(embedding):
        return {"framework": "torch", "dtype": str(embedding.dtype).removeprefix("torch."), "shape": shape}
    return {"framework": "numpy", "dtype": embedding.dtype.str, "shape": shape}


def to_raw(embedding: Any) -> Tensor:
    """The bytes of the embedding. Copies one that is not on the CPU."""
    if is_torch(embedding):
        torch = importlib.import_module("torch")
        raw = embedding.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        raw = np.ascontiguousarray(embedding).reshape(-1).view(np.uint8)
    return Tensor(raw, "U8")


def from_raw(tensor: Tensor, described: Mapping[str, Any]) -> Any:
    """The embedding on the CPU, in its own memory. Imports torch if the embedding was a torch tensor.

    Raises InputError if the description does not fit the tensor.
    """
    flat = np.array(tensor.data).reshape(-1).view(np.uint8)
    try:
        if described["framework"] == "numpy":
            embedding: Any = flat.view(described["dtype"])
        else:
            torch = importlib.import_module("torch")
            embedding = torch.from_numpy(flat).view(getattr(torch, described["dtype"]))
        return embedding.reshape(described["shape"])
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise InputError(f"stored encoder output does not fit its description ({error}): delete it") from error
