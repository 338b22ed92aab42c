"""As many torch threads as a small encoder is worth, while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def torch_threads(count: int = 1) -> Iterator[None]:
    """Small models lose more by contended threads than they gain. The number of threads is restored afterwards."""
    import torch

    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
