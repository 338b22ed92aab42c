"""Level 2: latent embeddings, with one index for each layer. Layers must agree on a donor.

With the best score over layers (`any`, as in the prototypes), the same picture under another
question passes on `vision` alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, overload

import numpy as np

from dejakv.config import LayerMatch
from dejakv.decide.levels.base import LevelSearch, Match, Query, Status, Vectors
from dejakv.errors import ConfigError, InputError
from dejakv.vectors.base import Vector, unit_vector
from dejakv.vectors.flat import FlatIndex
from dejakv.vectors.spaces import LayerSpec, VectorSpaces

_DEFAULT_SPACE = "default"
MAX_MATCHES = 8
DEPTHS = (32, 256, 4096)
"""Nearest vectors of a layer in successive searches, each in case the last was too narrow.

A donor beyond the last depth in *every* layer is missed, but no donor is wrongly accepted.
"""

LayerVectors = Mapping[str, Vector]
Indexes = Mapping[str, FlatIndex]
Combine = Callable[[Sequence[LayerSpec], LayerVectors, Indexes], list[Match]]


def all_layers(specs: Sequence[LayerSpec], rows: LayerVectors, indexes: Indexes) -> list[Match]:
    """Return up to 8 donors at or above the threshold in every layer, the best mean first.

    Each is scored by its weakest layer. If a layer has no vectors, nothing matches.

    Parameters
    ----------
    specs : Sequence[LayerSpec]
        The layers and their thresholds.
    rows : Mapping[str, Vector]
        Unit vectors of the query by layer.
    indexes : Mapping[str, FlatIndex]
        Indexes of the donors by layer.
    """
    if not specs or any(spec.name not in indexes for spec in specs):
        return []
    passed: list[Match] = []
    for donor, scores in _fully_scored(_above_in_one(specs, rows, indexes), specs, rows, indexes):
        if all(scores[spec.name] >= spec.threshold for spec in specs):
            weakest = min(scores, key=scores.__getitem__)
            passed.append(Match(donor, f"embedding:{weakest}", scores[weakest], scores))

    # By the mean and not by the weakest layer: each of them agrees already.
    passed.sort(key=lambda match: -sum(match.layers.values()))
    return passed[:MAX_MATCHES]


def any_layer(specs: Sequence[LayerSpec], rows: LayerVectors, indexes: Indexes) -> list[Match]:
    """Return up to 8 donors at or above the threshold in some layer, by their best score."""
    best: dict[str, tuple[str, float]] = {}
    for spec in specs:
        if spec.name not in indexes:
            continue
        for donor, score in indexes[spec.name].search(rows[spec.name], MAX_MATCHES, spec.threshold):
            if donor not in best or score > best[donor][1]:
                best[donor] = (spec.name, score)

    order = sorted(best, key=lambda donor: -best[donor][1])[:MAX_MATCHES]
    matches: list[Match] = []
    for donor in order:
        name, score = best[donor]
        layer_scores = {
            n: s
            for n, index in indexes.items()
            if (s := index.scores(rows[n], (donor,))[0]) is not None
        }
        matches.append(Match(donor, f"embedding:{name}", score, layer_scores))
    return matches


def mean_of_layers(specs: Sequence[LayerSpec], rows: LayerVectors, indexes: Indexes) -> list[Match]:
    """Return up to `MAX_MATCHES` donors by their mean score, best first.

    The mean must reach the layers' mean threshold. The search is Fagin's threshold algorithm
    (Fagin, Lotem & Naor, PODS 2001): a donor outside the first k of every layer has a mean of at
    most the mean of the k-th scores.
    """
    if not specs or any(spec.name not in indexes for spec in specs):
        return []
    min_mean = fmean(spec.threshold for spec in specs)
    passed: list[Match] = []
    for depth in DEPTHS:
        hits_by_layer = {
            spec.name: indexes[spec.name].search(rows[spec.name], depth) for spec in specs
        }
        donors = list(dict.fromkeys(donor for hits in hits_by_layer.values() for donor, _ in hits))

        passed = []
        for donor, scores in _fully_scored(donors, specs, rows, indexes):
            score = fmean(scores.values())
            if score >= min_mean:
                passed.append(Match(donor, "embedding:mean", score, scores))
        # Best first: what is not listed in any layer is compared with the best of these.
        passed.sort(key=lambda match: -match.score)

        # The most that a donor outside of all lists can have.
        unseen = fmean(
            hits[-1][1] if len(hits) == depth else -1.0 for hits in hits_by_layer.values()
        )
        if unseen < (passed[0].score if passed else min_mean):
            break

    return passed[:MAX_MATCHES]


def _above_in_one(specs: Sequence[LayerSpec], rows: LayerVectors, indexes: Indexes) -> list[str]:
    """Return donors above the threshold of one layer.

    It is the first layer, at the least depth, with a complete list.
    """
    widest: list[str] = []
    for depth in DEPTHS:
        for spec in specs:
            above = [
                donor
                for donor, _ in indexes[spec.name].search(rows[spec.name], depth, spec.threshold)
            ]
            # Complete: a donor above every threshold must be among these.
            if len(above) < depth:
                return above
            widest = above
    return widest


def _fully_scored(
    donors: Sequence[str], specs: Sequence[LayerSpec], rows: LayerVectors, indexes: Indexes
) -> list[tuple[str, dict[str, float]]]:
    """Return the donors with a score in every layer, and these scores."""
    # All donors of a layer at once: one product instead of one each.
    columns = {spec.name: indexes[spec.name].scores(rows[spec.name], donors) for spec in specs}

    whole: list[tuple[str, dict[str, float]]] = []
    for place, donor in enumerate(donors):
        scores = {
            name: score for name, column in columns.items() if (score := column[place]) is not None
        }
        if len(scores) == len(specs):
            whole.append((donor, scores))
    return whole


COMBINE: dict[str, Combine] = {"all": all_layers, "any": any_layer, "mean": mean_of_layers}


class EmbeddingCache:
    """Level that finds donors by the vectors of several layers.

    For `all` and `mean` a layer without a vector, on either side, agrees with nothing. A match
    names the deciding layer: for `all` the one with the lowest score, for `any` the best, for
    `mean` `embedding:mean`.

    Parameters
    ----------
    layers : Sequence[LayerSpec or str]
        Specs or `NAME:DIM[:THRESHOLD]`.
    match : {"all", "any", "mean"}
        `all`: every layer is at or above its threshold. `any`: one suffices, and the best decides.
        `mean`: the mean of the scores is at or above the mean of the thresholds.
    index : {"flat", "hnsw"}
        Kind of index; `flat` is exact.

    Raises
    ------
    ConfigError
        For a wrong layer, two layers of one name, and an unknown `match`.

    Examples
    --------
    >>> cache = EmbeddingCache(["prompt:2:0.9", "vision:2:0.8"])
    >>> cache.add("chunk_1", {"prompt": [1, 0], "vision": [0, 1]})
    >>> cache.search({"prompt": [1, 0], "vision": [0, 1]}).level
    'embedding:prompt'
    >>> cache.search({"prompt": [1, 0], "vision": [1, 0]}) is None  # the picture differs
    True
    """

    name = "embedding"

    def __init__(
        self, layers: Sequence[LayerSpec | str], match: LayerMatch = "all", *, index: str = "flat"
    ) -> None:
        specs = [LayerSpec.parse(layer) if isinstance(layer, str) else layer for layer in layers]
        if len({spec.name for spec in specs}) != len(specs):
            raise ConfigError(
                "two latent layers have one name: give each of embedding_layers "
                "(--embedding-layer) its own"
            )
        if match not in COMBINE:
            raise ConfigError(
                f"embedding_match={match!r} is unknown: choose one of {', '.join(COMBINE)}"
            )

        self.match = match
        self.layers: dict[str, LayerSpec] = {spec.name: spec for spec in specs}
        self.status_names = tuple(f"embedding:{name}" for name in self.layers)
        self._spaces = {spec.name: VectorSpaces(spec.dim, index) for spec in specs}

    @property
    def thresholds(self) -> dict[str, float]:
        """Thresholds by `Match.level`, for a `ThresholdGuard`."""
        by_level = {f"embedding:{spec.name}": spec.threshold for spec in self.layers.values()}
        return {**by_level, "embedding:mean": fmean(by_level.values())} if by_level else {}

    def encode(self, query: Query) -> None:
        """Compute the query's vectors.

        Parameters
        ----------
        query : Query
            Query whose `vectors` are computed.
        """
        _ = query.vectors

    @overload
    def search(self, query: Query) -> LevelSearch: ...

    @overload
    def search(self, query: Mapping[str, Any]) -> Match | None: ...

    def search(self, query: Query | Mapping[str, Any]) -> LevelSearch | Match | None:
        """Search by a `Query`, or by vectors `{layer: vector}` in the default space.

        Parameters
        ----------
        query : Query or Mapping[str, Any]
            Request and its space, or vectors of shape [dim] by layer.

        Returns
        -------
        LevelSearch or Match or None
            For a `Query` up to 8 matches, best first. For vectors the best match, or None.

        Raises
        ------
        ConfigError
            For a vector of another dimension than its layer's.
        """
        if isinstance(query, Query):
            return self._search(query.vectors, query.space)
        return next(iter(self._search(query, _DEFAULT_SPACE).matches), None)

    @overload
    def add(self, donor: str, query: Query) -> None: ...

    @overload
    def add(self, donor: str, query: Mapping[str, Any]) -> None: ...

    def add(self, donor: str, query: Query | Mapping[str, Any]) -> None:
        """Add a stored prompt as a donor by the layers with a vector.

        Parameters
        ----------
        donor : str
            Id of the donor's state.
        query : Query or Mapping[str, Any]
            Request and its space, or vectors of shape [dim] by layer, in the default space.

        Raises
        ------
        ConfigError
            For a vector of another dimension than its layer's.
        """
        vectors, space = (
            (query.vectors, query.space) if isinstance(query, Query) else (query, _DEFAULT_SPACE)
        )
        for name, row in self._rows(vectors).items():
            self._spaces[name].add(space, donor, row)

    def remove(self, donor: str) -> None:
        """Remove a donor from all layers and spaces.

        Parameters
        ----------
        donor : str
            Id of the donor's state.
        """
        for spaces in self._spaces.values():
            spaces.remove(donor)

    def __len__(self) -> int:
        return max((len(spaces) for spaces in self._spaces.values()), default=0)

    def _search(self, vectors: Vectors, space: str) -> LevelSearch:
        rows = self._rows(vectors)
        statuses: dict[str, Status] = {
            f"embedding:{n}": "miss" if n in rows else "skip" for n in self.layers
        }
        indexes = {
            name: index for name in rows if (index := self._spaces[name].get(space)) is not None
        }

        matches = COMBINE[self.match](list(self.layers.values()), rows, indexes)

        if matches:
            for name, score in matches[0].layers.items():
                # Under `any` some layers of the best match may be far below their threshold.
                if self.match != "any" or score >= self.layers[name].threshold:
                    statuses[f"embedding:{name}"] = "hit"
        return LevelSearch(tuple(matches), statuses)

    def _rows(self, vectors: Vectors) -> dict[str, Vector]:
        """Return unit vectors of the known layers; one without a direction counts as absent."""
        rows: dict[str, Vector] = {}
        for name, spec in self.layers.items():
            raw_vector = vectors.get(name)
            if raw_vector is None:
                continue
            vector = np.asarray(raw_vector, dtype=np.float32)

            spaces = self._spaces[name]
            # A layer of dimension `auto` takes that of its first vector.
            spaces.dim = spaces.dim or vector.size
            if vector.shape != (spaces.dim,):
                raise ConfigError(
                    replace(spec, dim=spaces.dim).misfit(
                        f"its vector has shape {vector.shape}", vector.size
                    )
                )
            try:
                rows[name] = unit_vector(vector, vector.size, f"layer {name!r}")
            except InputError:
                continue

        return rows
