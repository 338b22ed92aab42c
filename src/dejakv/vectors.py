"""Vectors at length one."""

import numpy as np
from numpy.typing import NDArray


def normalized(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors `[..., dim]` at length one, float32; a vector of zeros stays as it is."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
