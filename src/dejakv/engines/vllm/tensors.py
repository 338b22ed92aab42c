"""Between torch tensors and the store's framework-free ones."""

import numpy as np
import torch

from dejakv.store.base import Tensor

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
TYPES = {name: dtype for dtype, name in NAMES.items()}


def to_store(tensor: torch.Tensor) -> Tensor:
    """A contiguous tensor in host memory as the store takes it, without a copy. bfloat16 becomes uint16 bit patterns."""
    if tensor.dtype == torch.bfloat16:
        return Tensor(tensor.view(torch.int16).numpy().view(np.uint16), "BF16")
    return Tensor(tensor.numpy(), NAMES[tensor.dtype])


def to_torch(tensor: Tensor) -> torch.Tensor:
    """The other way. The data is copied if it is read-only (a memory map), since torch has no read-only tensors."""
    data = np.require(tensor.data, requirements=["C", "W"])
    if tensor.dtype == "BF16":
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(data)
