"""Synthetic vectors of `lookup.py`."""

from collections.abc import Iterator

import numpy as np

from dejakv.index.base import Vector

INNER = 48
BATCH = 10_000


class Space:
    """Where synthetic vectors come from: equal numbers give equal vectors, whatever the size of the whole."""

    def __init__(self, dim: int, seed: int) -> None:
        self.dim, self.seed = dim, seed
        self.basis = np.random.default_rng(seed).standard_normal((INNER, dim), dtype=np.float32) / np.sqrt(dim)

    def batch(self, number: int, size: int) -> Vector:
        rng = np.random.default_rng((self.seed, number))
        rows = rng.standard_normal((size, INNER), dtype=np.float32) @ self.basis
        rows += 0.05 * rng.standard_normal((size, self.dim), dtype=np.float32)
        return unit_rows(rows)

    def batches(self, count: int) -> Iterator[tuple[int, Vector]]:
        for start in range(0, count, BATCH):
            yield start, self.batch(start // BATCH, min(BATCH, count - start))

    def queries(self, count: int, asked: int) -> tuple[list[int], Vector]:
        """Rows of stored vectors at a cosine of about 0.9, and which those are."""
        rng = np.random.default_rng((self.seed, 999_999))
        held = self.batch(0, min(BATCH, count))
        places = rng.choice(len(held), min(asked, len(held)), replace=False)
        noise = unit_rows(rng.standard_normal((len(places), INNER), dtype=np.float32) @ self.basis)
        return places.tolist(), unit_rows(held[places] + 0.48 * noise)


def unit_rows(rows: Vector) -> Vector:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)
