"""How far two distributions of a token are apart."""

import numpy as np
from numpy.typing import NDArray


def divergence(wanted: NDArray[np.float32], got: NDArray[np.float32]) -> NDArray[np.float64]:
    """Kullback-Leibler divergence of `got` from `wanted` at each token, `[tokens]`, in nats, from two arrays
    `[tokens, vocabulary]` of log probabilities."""
    return np.maximum(0.0, np.sum(np.exp(wanted) * (wanted - got), axis=-1, dtype=np.float64))
