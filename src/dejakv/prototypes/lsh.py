"""Hashes of vectors by random hyperplanes (Charikar, STOC 2002): the names of Sim-LLM's buckets."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import ConfigError
from dejakv.vectors.base import Vector
from dejakv.vectors.flat import FlatIndex


class LSHIndex(FlatIndex):
    """Flat index that also hashes vectors by random hyperplanes.

    A search compares with every vector.

    Character i of a hash is 1 if `plane_i . v >= 0`, so a vector on a plane counts as above it; the
    string starts with plane 0. Planes are drawn from a standard normal by
    `numpy.random.default_rng(seed)`: equal arguments give equal hashes on every machine.

    Parameters
    ----------
    embedding_dim : int
        Components of the vectors.
    num_hyperplanes : int
        Characters of a hash, at least 1.
    seed : int
        Seed of the planes.

    Raises
    ------
    ConfigError
        If `num_hyperplanes` is below 1.

    Examples
    --------
    >>> index = LSHIndex(embedding_dim=4, num_hyperplanes=8, seed=42)
    >>> index.compute_hash([1.0, 2.0, 3.0, 4.0]) == index.compute_hash([10.0, 20.0, 30.0, 40.0])
    True
    """

    def __init__(self, embedding_dim: int, num_hyperplanes: int = 16, seed: int = 42) -> None:
        if num_hyperplanes < 1:
            raise ConfigError(
                f"num_hyperplanes={num_hyperplanes} is out of range: give 1 or more (16 is usual)"
            )

        super().__init__(embedding_dim)
        planes = np.random.default_rng(seed).standard_normal((num_hyperplanes, embedding_dim))
        self.hyperplanes: Vector = planes.astype(np.float32)

    @property
    def embedding_dim(self) -> int:
        """Components of the vectors."""
        return self.dim

    @property
    def num_hyperplanes(self) -> int:
        """Characters of a hash."""
        return len(self.hyperplanes)

    def compute_hash(self, embedding: Any) -> str:
        """Hash a `[dim]` vector (numpy or torch) to `num_hyperplanes` characters 0 and 1.

        Parameters
        ----------
        embedding : array or Tensor, shape [dim]
            Vector to hash.

        Returns
        -------
        str
            Hash of `num_hyperplanes` characters.
        """
        return self.compute_hash_batch(_array(embedding)[None])[0]

    def compute_hash_batch(self, embeddings: Any) -> list[str]:
        """Hash `[n, dim]` vectors (numpy or torch), in order.

        Parameters
        ----------
        embeddings : array or Tensor, shape [n, dim]
            Vectors to hash.

        Returns
        -------
        list[str]
            Hash of each vector, of `num_hyperplanes` characters.

        Raises
        ------
        ConfigError
            If the array has another shape.

        Examples
        --------
        >>> LSHIndex(2, num_hyperplanes=4).compute_hash_batch([[0.0, 0.0]])
        ['1111']
        """
        array = _array(embeddings)
        if array.ndim != 2 or array.shape[1] != self.dim:
            raise ConfigError(
                f"embeddings of shape {tuple(array.shape)} do not fit hyperplanes of dimension "
                f"{self.dim}: "
                f"make the index with embedding_dim={array.shape[-1] if array.ndim else 0}"
            )

        bits = array @ self.hyperplanes.T >= 0
        return ["".join("1" if bit else "0" for bit in row) for row in bits.tolist()]


def _array(embeddings: Any) -> NDArray[np.float32]:
    if hasattr(embeddings, "detach"):
        embeddings = embeddings.detach().float().cpu().numpy()
    return np.asarray(embeddings, dtype=np.float32)
