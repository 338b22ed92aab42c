"""L2: latent embeddings: one index a layer, and a donor is found where the layers agree.

`match="all"` wants every layer above its own threshold. The best score over layers ("any") lets the same picture under
another question pass on `vision` alone and return the wrong answer; it exists because the prototypes did that.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np

from dejakv.config.find import LayerMatch
from dejakv.encoders.layers import LayerSpec
from dejakv.errors import ConfigError, InputError
from dejakv.index.base import Vector, VectorIndex, unit
from dejakv.index.spaces import Spaces
from dejakv.levels.base import Match, Query, Search, Status, Vectors
from dejakv.levels.combine import COMBINE

_DEFAULT_SPACE = "default"


class EmbeddingCache:
    """Donors by the vectors of several layers. Thread-safe.

    layers  specs or `NAME:DIM[:THRESHOLD]`
    match   `all`: every layer at or above its threshold. `any`: one is enough, the best decides. `mean`: the weighted
            mean of the scores at or above the weighted mean of the thresholds
    index   `flat` (exact), `hnsw` or `lsh`

    For `all` and `mean` a layer without a vector, on either side, agrees with nothing. A match names the layer that
    decided: for `all` the one with the lowest score, for `any` the best, for `mean` `embedding:mean`.
    """

    name = "embedding"

    def __init__(self, layers: Sequence[LayerSpec | str], match: LayerMatch = "all", *, index: str = "flat") -> None:
        specs = [LayerSpec.parse(layer) if isinstance(layer, str) else layer for layer in layers]
        if len({spec.name for spec in specs}) != len(specs):
            raise ConfigError(
                "two latent layers have one name: give each of embedding_layers (--embedding-layer) its own"
            )
        if match not in COMBINE:
            raise ConfigError(f"embedding_match={match!r} is unknown: choose one of {', '.join(COMBINE)}")
        self.match = match
        self.layers: dict[str, LayerSpec] = {spec.name: spec for spec in specs}
        self.status_names = tuple(f"embedding:{name}" for name in self.layers)
        self._kind = index
        self._spaces = {spec.name: Spaces(spec.dim, index) for spec in specs if spec.dim is not None}
        self._lock = threading.Lock()

    @property
    def thresholds(self) -> dict[str, float]:
        """By the level that a match names, for a `ThresholdGuard`."""
        specs = self.layers.values()
        named = {f"embedding:{spec.name}": spec.threshold for spec in specs}
        if specs:
            named["embedding:mean"] = sum(s.weight * s.threshold for s in specs) / sum(s.weight for s in specs)
        return named

    @overload
    def search(self, query: Query) -> Search: ...

    @overload
    def search(self, query: Mapping[str, Any]) -> Match | None: ...

    def search(self, query: Query | Mapping[str, Any]) -> Search | Match | None:
        """For a `Query`, a `Search` with up to 8 matches, best first; for `{layer: vector}`, the best match or None.

        Raises ConfigError for a vector of another dimension than its layer's.
        """
        if isinstance(query, Query):
            return self._search(query.vectors, query.space)
        matches = self._search(query, _DEFAULT_SPACE).matches
        return matches[0] if matches else None

    @overload
    def add(self, donor: str, query: Query) -> None: ...

    @overload
    def add(self, donor: str, query: Mapping[str, Any]) -> None: ...

    def add(self, donor: str, query: Query | Mapping[str, Any]) -> None:
        """Makes a chunk a donor by whichever layers have a vector. Raises ConfigError as `search` does."""
        vectors, space = (query.vectors, query.space) if isinstance(query, Query) else (query, _DEFAULT_SPACE)
        for name, row in self._rows(vectors).items():
            self._spaces[name].add(space, donor, row)

    def remove(self, donor: str) -> None:
        for spaces in tuple(self._spaces.values()):
            spaces.remove(donor)

    @property
    def nbytes(self) -> int:
        """Memory of the vectors of all layers."""
        return sum(spaces.nbytes for spaces in tuple(self._spaces.values()))

    def __len__(self) -> int:
        return max((len(spaces) for spaces in tuple(self._spaces.values())), default=0)

    def _search(self, vectors: Vectors, space: str) -> Search:
        rows = self._rows(vectors)
        statuses: dict[str, Status] = {f"embedding:{n}": "miss" if n in rows else "skip" for n in self.layers}
        indexes: dict[str, VectorIndex] = {}
        for name in rows:
            index = self._spaces[name].get(space)
            if index is not None:
                indexes[name] = index
        matches = COMBINE[self.match](list(self.layers.values()), rows, indexes)
        if matches:
            for name, score in matches[0].layers.items():
                if self.match != "any" or score >= self.layers[name].threshold:
                    statuses[f"embedding:{name}"] = "hit"
        return Search(tuple(matches), statuses)

    def _rows(self, vectors: Vectors) -> dict[str, Vector]:
        """Unit vectors of the layers that are known here; one without a direction counts as absent."""
        rows: dict[str, Vector] = {}
        for name, spec in self.layers.items():
            given = vectors.get(name)
            if given is None:
                continue
            vector = np.asarray(given, dtype=np.float32)
            if spec.dim is None:
                spec = self._settle(spec, vector.size)
            if vector.shape != (spec.dim,):
                raise ConfigError(
                    f"layer {name!r} was declared with dimension {spec.dim}, but its vector has shape {vector.shape}: "
                    f"write {name}:{vector.size}:{spec.threshold:g} in embedding_layers (--embedding-layer)"
                )
            try:
                rows[name] = unit(vector, vector.size, f"layer {name!r}")
            except InputError:
                continue
        return rows

    def _settle(self, spec: LayerSpec, dim: int) -> LayerSpec:
        """The first vector of a layer of dimension `auto` settles it."""
        with self._lock:
            held = self.layers[spec.name]
            if held.dim is None:
                held = replace(spec, dim=dim)
                self._spaces[spec.name] = Spaces(dim, self._kind)
                self.layers[spec.name] = held
            return held
