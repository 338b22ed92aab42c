"""Between torch tensors and the store's framework-free ones, without a copy."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.store.base import Tensor

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
TYPES = {name: dtype for dtype, name in NAMES.items()}


class _Borrowed:
    """A read-only array's memory, offered as if it could be written to: torch knows no read-only tensors."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array  # numpy keeps this object as long as the view, and with it the memory
        described = array.__array_interface__
        self.__array_interface__ = {**described, "data": (described["data"][0], False)}


def to_store(tensor: torch.Tensor) -> Tensor:
    """A contiguous tensor in host memory as the store takes it. bfloat16 becomes uint16 bit patterns."""
    if tensor.dtype == torch.bfloat16:
        return Tensor(tensor.view(torch.int16).numpy().view(np.uint16), "BF16")
    return Tensor(tensor.numpy(), NAMES[tensor.dtype])


def borrowed(tensor: Tensor) -> torch.Tensor:
    """The other way: the store's own memory. It may be a memory map or shared, so it must never be written to."""
    data = np.ascontiguousarray(tensor.data)
    if not data.flags.writeable:
        data = np.asarray(_Borrowed(data))
    if tensor.dtype == "BF16":
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(data)
