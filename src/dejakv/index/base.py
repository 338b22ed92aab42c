"""The seam of a vector index: ids and unit vectors in, the nearest ids by cosine out."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import ConfigError, InputError

Vector = NDArray[np.float32]
Hit = tuple[str, float]

ANY = -2.0
"""Below every cosine: no threshold."""


class VectorIndex(Protocol):
    """Vectors by id. Thread-safe. Vectors are normalized when added, so every score is a cosine in [-1, 1].

    `add` of a known id replaces its vector; `remove` of an unknown one does nothing (False).
    Raises ConfigError for a vector of another dimension and InputError for one without a direction (zero, NaN, infinite).
    """

    @property
    def dim(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Memory of the vectors and of the index structure, without the ids."""
        ...

    def add(self, id: str, vector: Vector) -> None: ...

    def remove(self, id: str) -> bool: ...

    def search(self, vector: Vector, k: int = 1, least: float = ANY) -> list[Hit]:
        """At most `k` pairs (id, cosine), best first, none with a cosine below `least`."""
        ...

    def scores(self, vector: Vector, ids: Sequence[str]) -> list[float | None]:
        """The cosine with each of these ids; None for an unknown id."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, id: object) -> bool: ...


def unit(vector: Any, dim: int, what: str = "the index") -> Vector:
    """The vector as a contiguous `[dim]` float32 array of length 1. `what` names its user in errors."""
    array = np.asarray(vector, dtype=np.float32)
    if array.ndim != 1 or array.shape[0] != dim:
        raise ConfigError(
            f"a vector of shape {tuple(array.shape)} does not fit {what} of dimension {dim}: "
            "use the encoder that the index was made for, or make the index with the encoder's dimension"
        )
    with np.errstate(over="ignore"):
        square = float(array.dot(array))
    if 1e-30 < square < 1e30:
        return array * np.float32(square**-0.5)
    return _scaled(array, what)


def _scaled(array: Vector, what: str) -> Vector:
    """A vector whose squared length does not fit float32, or that has no direction at all."""
    wide = array.astype(np.float64)
    length = float(np.linalg.norm(wide))
    if not 0.0 < length < np.inf:
        raise InputError(
            f"a vector for {what} has no direction (it is zero, or contains NaN or infinity): "
            "check the encoder's input, and skip the request for this level"
        )
    return (wide / length).astype(np.float32)


def normalized(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors `[..., dim]` at length one, float32; a vector of zeros stays as it is."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
