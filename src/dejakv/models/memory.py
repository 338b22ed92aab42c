"""Whether an error says that memory ran out."""

import torch

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, on a device or on the host. PyTorch has a class for it on CUDA alone; elsewhere, pinned
    memory included, it raises a plain RuntimeError that says so."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
