"""Arrays of numpy, and torch's tensors on any device, as raw bytes.

Torch is imported only where a torch tensor is written or read, so that a program without it can
use what needs none.
"""

import importlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import InputError
from dejakv.store.base import RawTensor


def is_array(value: Any) -> bool:
    """Tell whether a value is a numpy array of plain numbers or a torch tensor."""
    return is_torch(value) or (
        isinstance(value, np.ndarray) and not cast("NDArray[Any]", value).dtype.hasobject
    )


def is_torch(array: Any) -> bool:
    """Tell whether it is a torch tensor (anything with an untyped storage counts)."""
    return hasattr(array, "untyped_storage")


def owned(array: Any) -> Any:
    """Detach an array from its autograd graph, and from the storage of a larger batch.

    A slice of a batch's output keeps the whole batch in memory, which no byte budget would count.
    Compact, plain arrays come back as they are; others are copied once.
    """
    if is_torch(array):
        if array.requires_grad:
            array = array.detach()
        # A view is larger than its elements: its storage is the whole batch's.
        return array.clone() if array.untyped_storage().nbytes() > array.nbytes else array

    array = cast("NDArray[Any]", array)
    base = array.base
    return (
        array.copy()
        if base is not None and int(getattr(base, "nbytes", 0)) > array.nbytes
        else array
    )


def is_finite(array: Any) -> bool:
    """Tell whether an array has neither NaN nor infinity; integers have none."""
    if is_torch(array):
        if array.is_floating_point() and array.element_size() == 1:
            # torch has no `isfinite` for its 8-bit floats.
            array = array.float()
        return not (array.is_floating_point() or array.is_complex()) or bool(array.isfinite().all())

    array = cast("NDArray[Any]", array)
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def size_of(array: Any) -> int:
    """Return the bytes of the elements: their number times the element size."""
    nbytes = getattr(array, "nbytes", None)
    if nbytes is None:
        nbytes = array.element_size() * array.nelement()
    return int(nbytes)


def describe(array: Any) -> dict[str, Any]:
    """Describe framework, dtype and shape, for `from_raw`."""
    shape = [int(size) for size in array.shape]
    if is_torch(array):
        return {
            "framework": "torch",
            "dtype": str(array.dtype).removeprefix("torch."),
            "shape": shape,
        }

    return {"framework": "numpy", "dtype": array.dtype.str, "shape": shape}


def to_raw(array: Any) -> RawTensor:
    """Return the bytes of the array: a copy unless it is on the CPU and contiguous."""
    if is_torch(array):
        torch = importlib.import_module("torch")
        # As bytes, since numpy has no bfloat16 and no 8-bit floats.
        raw = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    return RawTensor(raw, "U8")


def from_raw(tensor: RawTensor, described: Mapping[str, Any]) -> Any:
    """Return the array on the CPU, in its own memory, of the framework that it was stored from.

    Raises
    ------
    InputError
        If the description does not fit the bytes.
    """
    # A copy: the store's bytes are shared and cannot be written to.
    flat = np.array(tensor.data).reshape(-1).view(np.uint8)
    try:
        if described["framework"] == "numpy":
            array: Any = flat.view(described["dtype"])
        else:
            torch = importlib.import_module("torch")
            array = torch.from_numpy(flat).view(getattr(torch, described["dtype"]))

        return array.reshape(described["shape"])
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise InputError(
            f"the stored array does not fit its description ({error}): delete it"
        ) from error
