"""Other ways to choose hits: fixed thresholds on the score, GPTCache's default, and vCache's rule."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from scipy.stats import norm

from research.trust.gates import Table, interval, orders_of

GPTCACHE = 0.8
"""GPTCache's default similarity threshold, taken for a cosine."""


def loosest(scores: NDArray[Any], wrong: NDArray[Any], delta: float) -> float:
    """The lowest threshold whose hits are wrong in at most delta of all; infinite if there is none."""
    order = np.argsort(-scores, kind="stable")
    known = scores[order]
    last = np.append(known[1:] != known[:-1], True)  # equal scores are served together
    good = last & (np.cumsum(wrong[order]) <= delta * np.arange(1, len(order) + 1))
    return float(known[np.flatnonzero(good)[-1]]) if good.any() else np.inf


def static_row(table: Table, delta: float, ordered: str, orders: int, length: int, seed: int) -> dict[str, Any]:
    """A threshold on the score, or on minus the risk, chosen on the first half of each order, where all is labelled, and applied to
    the second."""
    values = values_of(table, ordered)
    random = np.random.default_rng(seed)
    served, bad, violated, opened = [], [], [], []
    steps = length or len(table)
    for rows in orders_of(len(table), orders, length, random):
        half = steps // 2
        least = loosest(values[rows[:half]], table.wrong[rows[:half]], delta)
        hits = rows[half:][values[rows[half:]] >= least]
        served.append(len(hits))
        bad.append(int(table.wrong[hits].sum()))
        under = table.wrong[values >= least]
        violated.append(bool(len(under)) and under.mean() > delta)
        opened.append(len(hits) > 0)
    return _row(
        f"threshold on the {ordered}, chosen on the first half", served, bad, violated, opened, steps, labels=steps // 2
    )


def values_of(table: Table, ordered: str) -> NDArray[np.float64]:
    """What a threshold is put on."""
    return table.scores if ordered == "score" else -table.risks


def hindsight_row(table: Table, delta: float, ordered: str) -> dict[str, Any]:
    """The best threshold in hindsight, on the score or on minus the risk: no rule of that order can keep more hits."""
    values = values_of(table, ordered)
    hits = values >= loosest(values, table.wrong, delta)
    bad = int(table.wrong[hits].sum())
    row = _row(
        f"best threshold on the {ordered} in hindsight", [int(hits.sum())], [bad], [False], [bool(hits.any())], len(table)
    )  # fmt: skip
    return {**row, "work": table.work(hits) if ordered == "risk" else None}


def gptcache_row(table: Table, delta: float) -> dict[str, Any]:
    hits = table.scores >= GPTCACHE
    bad, served = int(table.wrong[hits].sum()), int(hits.sum())
    return _row(f"GPTCache, {GPTCACHE}", [served], [bad], [bad > delta * served], [served > 0], len(table))


VCACHE = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Bounds of its own that vCache is tried with."""


class VCache:
    """vCache's rule (arXiv 2502.03771), from the paper: each stored prompt has a curve of its own, fitted to what was seen of it.

    delta  of the rule: it bounds errors over all requests, of which the explored ones are right
    """

    LEVELS = np.linspace(0.01, 0.99, 50)
    LEAST = 6

    def __init__(self, delta: float) -> None:
        self._delta = delta
        self._seen: dict[str, tuple[list[float], list[float]]] = {}
        self._fits: dict[str, tuple[float, float, float]] = {}

    def serves(self, donor: str, score: float, chance: float) -> bool:
        """Whether it serves; else it explores."""
        if len(self._seen.get(donor, ((), ()))[0]) - 2 < self.LEAST:
            return False
        steep, middle, error = self._fits.get(donor) or self._fit(donor)
        if steep <= 0:
            return False
        threshold = middle + norm.ppf(1 - self.LEVELS) * error
        right = (1 - self.LEVELS) * expit(steep * (score - threshold))
        return chance > float(np.min(1 - self._delta / (1 - right)))

    def learn(self, donor: str, score: float, right: bool) -> None:
        """What exploring showed."""
        scores, truths = self._seen.setdefault(donor, ([0.0, 1.0], [0.0, 1.0]))
        scores.append(score)
        truths.append(float(right))
        self._fits.pop(donor, None)

    def _fit(self, donor: str) -> tuple[float, float, float]:
        """Steepness, middle in [0, 1] and its standard error, by the delta method."""
        scores, truths = (np.array(part) for part in self._seen[donor])
        design = np.stack([scores, np.ones_like(scores)], axis=1)
        weights = np.array([1.0, -0.5])
        inverse = np.eye(2)
        for _ in range(25):
            chance = expit(design @ weights)
            slope = design.T @ (truths - chance) - 1e-3 * weights
            curve = design.T @ (design * (chance * (1 - chance))[:, None]) + 1e-3 * np.eye(2)
            inverse = np.linalg.inv(curve)
            step = inverse @ slope
            weights = weights + step
            if np.abs(step).max() < 1e-6:
                break
        steep, shift = weights.tolist()
        if steep <= 0:
            return self._keep(donor, (0.0, 1.0, 0.0))
        gradient = np.array([shift / steep**2, -1 / steep])
        error = float(np.sqrt(max(0.0, gradient @ inverse @ gradient)))
        return self._keep(donor, (steep, float(np.clip(-shift / steep, 0, 1)), error))

    def _keep(self, donor: str, fit: tuple[float, float, float]) -> tuple[float, float, float]:
        self._fits[donor] = fit
        return fit


def vcache_runs(table: Table, own: float, orders: int, length: int, seed: int) -> tuple[list[int], list[int]]:
    """Hits and wrong hits of each order at its bound `own`. A table without donors is one entry, which learns faster."""
    random = np.random.default_rng(seed)
    served, bad = [], []
    steps = length or len(table)
    for rows in orders_of(len(table), orders, length, random):
        cache, hits, wrong = VCache(own), 0, 0
        for row, chance in zip(rows.tolist(), random.random(steps).tolist(), strict=True):
            donor = table.donors[row] if table.donors else ""
            score, is_wrong = float(table.scores[row]), bool(table.wrong[row])
            if cache.serves(donor, score, chance):
                hits, wrong = hits + 1, wrong + is_wrong
            else:
                cache.learn(donor, score, not is_wrong)
        served.append(hits)
        bad.append(wrong)
    return served, bad


def _vcache_row(
    table: Table, delta: float, own: float, run: tuple[list[int], list[int]], length: int, note: str = ""
) -> dict[str, Any]:
    """Judged by `delta` of what it served."""
    served, bad = run
    steps = length or len(table)
    violated = [errors > delta * hits for hits, errors in zip(served, bad, strict=True)]
    opened = [hits > 0 for hits in served]
    labels = steps - float(np.mean(served))
    return _row(f"vCache, its delta {own:g} {note}".rstrip(), served, bad, violated, opened, steps, labels=labels)


def vcache_rows(
    table: Table, bounds: Sequence[float], orders: int, length: int, seed: int
) -> Iterator[tuple[float, dict[str, Any]]]:
    """For each bound: vCache at the same number, and at that of its own bounds which keeps most hits while its realised error per hit
    is at most the bound. The second is chosen in hindsight; where none is so good there is the first alone."""
    runs = {own: vcache_runs(table, own, orders, length, seed) for own in sorted({*VCACHE, *bounds})}
    for delta in bounds:
        yield delta, _vcache_row(table, delta, delta, runs[delta], length)
        rows = [_vcache_row(table, delta, own, run, length, "in hindsight") for own, run in runs.items()]
        fair = [row for row in rows if row["error"] is not None and row["error"] <= delta]
        if fair:
            yield delta, max(fair, key=lambda row: row["hits"])


def _row(
    method: str, served: Any, bad: Any, violated: Any, opened: Any, steps: int, labels: float | None = None
) -> dict[str, Any]:
    hits, errors = float(np.mean(served)), float(np.mean(bad))
    return {
        "method": method,
        "violated": float(np.mean(violated)),
        "opened": float(np.mean(opened)),
        "first": None,
        "hits": hits / steps,
        "error": errors / hits if hits else None,
        "interval": interval(errors, hits),
        "labels": labels,
        "work": None,
        "twice": None if labels is None else labels / steps,
    }
