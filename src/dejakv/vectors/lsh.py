"""Locality-sensitive hashing by random hyperplanes (Charikar, STOC 2002), searched with multi-probe.

Multi-probe: Lv et al., VLDB 2007. Beside the query's own bucket, the search examines the buckets across the planes
nearest to the query, nearest first.
"""

import heapq
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import ConfigError
from dejakv.vectors.base import ANY, Hit, Vector, unit
from dejakv.vectors.flat import FlatIndex


class LSHIndex(FlatIndex):
    """Index with a bucket for each combination of sides of random hyperplanes.

    Bit i is 1 if `plane_i . v >= 0`, so a vector on a plane counts as above it; the string starts with plane 0. Planes are drawn from a
    standard normal by `numpy.random.default_rng(seed)`: equal arguments give equal hashes on every machine.

    probes        buckets examined by a search, including the query's own
    scan_below    number of entries below which all are compared

    >>> index = LSHIndex(embedding_dim=4, num_hyperplanes=8, seed=42)
    >>> index.compute_hash([1.0, 2.0, 3.0, 4.0]) == index.compute_hash([10.0, 20.0, 30.0, 40.0])
    True
    """

    def __init__(
        self, embedding_dim: int, num_hyperplanes: int = 16, seed: int = 42, *, probes: int = 64, scan_below: int = 1024
    ) -> None:
        if not 1 <= num_hyperplanes <= 62:
            raise ConfigError(f"num_hyperplanes={num_hyperplanes} is out of range: give 1 to 62 (16 is usual)")
        super().__init__(embedding_dim)
        self._probes = probes
        self._scan_below = scan_below
        self.hyperplanes: Vector = _hyperplanes(num_hyperplanes, embedding_dim, seed)
        self._buckets: dict[int, dict[str, None]] = {}
        self._bucket_of: dict[str, int] = {}

    @property
    def embedding_dim(self) -> int:
        return self.dim

    @property
    def num_hyperplanes(self) -> int:
        return len(self.hyperplanes)

    def compute_hash(self, embedding: Any) -> str:
        """Hash a `[dim]` vector (numpy or torch) to `num_hyperplanes` characters 0 and 1."""
        return self.compute_hash_batch(_array(embedding)[None])[0]

    def compute_hash_batch(self, embeddings: Any) -> list[str]:
        """Hash `[n, dim]` vectors, in order.

        >>> LSHIndex(2, num_hyperplanes=4).compute_hash_batch([[0.0, 0.0]])
        ['1111']
        """
        array = _array(embeddings)
        if array.ndim != 2 or array.shape[1] != self.dim:
            raise ConfigError(
                f"embeddings of shape {tuple(array.shape)} do not fit hyperplanes of dimension {self.dim}: "
                f"make the index with embedding_dim={array.shape[-1] if array.ndim else 0}"
            )
        bits = array @ self.hyperplanes.T >= 0
        return ["".join("1" if bit else "0" for bit in row) for row in bits.tolist()]

    def add(self, id: str, vector: Vector) -> None:
        row = unit(vector, self.dim)
        bucket = self._code(self.hyperplanes.dot(row))
        self._unhash(id)
        super().add(id, row)
        self._bucket_of[id] = bucket
        self._buckets.setdefault(bucket, {})[id] = None

    def remove(self, id: str) -> bool:
        self._unhash(id)
        return super().remove(id)

    def search(self, vector: Vector, k: int = 1, least: float = ANY) -> list[Hit]:
        query = unit(vector, self.dim)
        if len(self) < self._scan_below:
            return super().search(query, k, least)
        margins = self.hyperplanes.dot(query)
        code = self._code(margins)
        near: list[str] = []
        for flips in _probe_order(np.abs(margins), self._probes):
            near.extend(self._buckets.get(code ^ flips, ()))
        scores = self.scores(query, near)
        found = [(id, score) for id, score in zip(near, scores, strict=True) if score is not None and score >= least]
        found.sort(key=lambda hit: -hit[1])
        return found[:k]

    def _code(self, margins: Vector) -> int:
        code = 0
        for above in (margins >= 0).tolist():
            code = code << 1 | above
        return code

    def _unhash(self, id: str) -> None:
        bucket = self._bucket_of.pop(id, None)
        if bucket is None:
            return
        held = self._buckets[bucket]
        del held[id]
        if not held:
            del self._buckets[bucket]


def _probe_order(distances: Vector, probes: int) -> Iterator[int]:
    """Sets of planes to cross, as bit masks, cheapest first: cost is the sum of squared distances to the crossed planes."""
    yield 0
    count = len(distances)
    order = np.argsort(distances).tolist()
    masks = [1 << (count - 1 - plane) for plane in order]
    costs = [float(distances[plane]) ** 2 for plane in order]
    # A set whose last member is i yields the set with i replaced by i+1 and the set with i+1 added: each set once.
    heap: list[tuple[float, int, int]] = [(costs[0], 0, masks[0])]
    for _ in range(min(probes, 2**count) - 1):
        cost, last, mask = heapq.heappop(heap)
        yield mask
        if last + 1 < count:
            heapq.heappush(heap, (cost + costs[last + 1], last + 1, mask | masks[last + 1]))
            moved = mask ^ masks[last] | masks[last + 1]
            heapq.heappush(heap, (cost - costs[last] + costs[last + 1], last + 1, moved))


@lru_cache(maxsize=16)
def _hyperplanes(count: int, dim: int, seed: int) -> Vector:
    """Draw the planes once for all spaces: thousands of indexes share one array."""
    planes = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    planes.setflags(write=False)
    return planes


def _array(embeddings: Any) -> NDArray[np.float32]:
    if hasattr(embeddings, "detach"):
        embeddings = embeddings.detach().float().cpu().numpy()
    return np.asarray(embeddings, dtype=np.float32)
