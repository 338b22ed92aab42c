"""Embeddings of any framework: numpy arrays and torch tensors are distinguished without importing torch."""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import InputError


class Embedding(Protocol):
    """The common interface of numpy arrays and torch tensors that the cache needs."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def nbytes(self) -> int: ...


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
