"""How the scores of several layers become one decision: a function a way, over the layers' indexes of one space."""

from collections.abc import Callable, Mapping, Sequence

from dejakv.encoders.layers import LayerSpec
from dejakv.index.base import Hit, Vector, VectorIndex
from dejakv.levels.base import Match

MAX_MATCHES = 8
DEPTHS = (32, 256, 4096)
"""How many of a layer's nearest are looked at, and again if that may not have been enough. A donor that is beyond the
last depth in *every* layer is missed, never wrongly found."""

Rows = Mapping[str, Vector]
Indexes = Mapping[str, VectorIndex]
Combine = Callable[[Sequence[LayerSpec], Rows, Indexes], list[Match]]


def all_layers(specs: Sequence[LayerSpec], rows: Rows, indexes: Indexes) -> list[Match]:
    """Donors at or above the threshold in every layer, by their mean score."""
    if not specs or any(spec.name not in indexes for spec in specs):
        return []
    passed: list[Match] = []
    for donor, scores in _whole(_above_in_one(specs, rows, indexes), specs, rows, indexes):
        if all(scores[spec.name] >= spec.threshold for spec in specs):
            weakest = min(scores, key=scores.__getitem__)
            passed.append(Match(donor, f"embedding:{weakest}", scores[weakest], scores))
    passed.sort(key=lambda match: -sum(match.layers.values()))
    return passed[:MAX_MATCHES]


def any_layer(specs: Sequence[LayerSpec], rows: Rows, indexes: Indexes) -> list[Match]:
    """Donors at or above the threshold in some layer, by their best score."""
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
        others = {n: s for n, index in indexes.items() if (s := index.scores(rows[n], (donor,))[0]) is not None}
        matches.append(Match(donor, f"embedding:{name}", score, others))
    return matches


def mean_of_layers(specs: Sequence[LayerSpec], rows: Rows, indexes: Indexes) -> list[Match]:
    """Donors whose weighted mean score reaches the weighted mean threshold, by that score.

    Fagin's threshold algorithm (Fagin, Lotem & Naor, PODS 2001): no donor that is not among the first k of any layer can
    have a mean above the mean of the k-th scores.
    """
    if not specs or any(spec.name not in indexes for spec in specs):
        return []
    total = sum(spec.weight for spec in specs)
    least = sum(spec.weight * spec.threshold for spec in specs) / total
    passed: list[Match] = []
    for depth in DEPTHS:
        found = {spec.name: indexes[spec.name].search(rows[spec.name], depth) for spec in specs}
        donors = list(dict.fromkeys(donor for hits in found.values() for donor, _ in hits))
        passed = []
        for donor, scores in _whole(donors, specs, rows, indexes):
            score = sum(spec.weight * scores[spec.name] for spec in specs) / total
            if score >= least:
                passed.append(Match(donor, "embedding:mean", score, scores))
        passed.sort(key=lambda match: -match.score)
        unseen = sum(spec.weight * _floor(found[spec.name], depth) for spec in specs) / total
        if unseen < (passed[0].score if passed else least):
            break
    return passed[:MAX_MATCHES]


def _above_in_one(specs: Sequence[LayerSpec], rows: Rows, indexes: Indexes) -> list[str]:
    """Every donor above the threshold of one layer: the first layer, and the least depth, at which that is a whole list."""
    widest: list[str] = []
    for depth in DEPTHS:
        for spec in specs:
            above = [donor for donor, _ in indexes[spec.name].search(rows[spec.name], depth, spec.threshold)]
            if len(above) < depth:
                return above
            widest = above
    return widest


def _whole(
    donors: Sequence[str], specs: Sequence[LayerSpec], rows: Rows, indexes: Indexes
) -> list[tuple[str, dict[str, float]]]:
    """The donors that have a score in every layer, with their scores."""
    columns = {spec.name: indexes[spec.name].scores(rows[spec.name], donors) for spec in specs}
    whole: list[tuple[str, dict[str, float]]] = []
    for place, donor in enumerate(donors):
        scores = {name: score for name, column in columns.items() if (score := column[place]) is not None}
        if len(scores) == len(specs):
            whole.append((donor, scores))
    return whole


def _floor(hits: Sequence[Hit], depth: int) -> float:
    """No donor outside the list scores above this."""
    return hits[-1][1] if len(hits) == depth else -1.0


COMBINE: dict[str, Combine] = {"all": all_layers, "any": any_layer, "mean": mean_of_layers}
