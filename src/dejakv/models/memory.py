"""Recognising errors for lack of memory."""

import torch

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, on a device or on the host. PyTorch has a class for it only on CUDA; elsewhere, including
    pinned memory, it raises a plain RuntimeError with a message."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
