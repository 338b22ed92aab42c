"""A table in many random orders through the gate, and beside it thresholds without a bound."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from dejakv.trust.evidence import Terms
from research.trust.replay import Replayed, replayed

BATCH = 250
"""Orders that are replayed at once."""


@dataclass(frozen=True)
class Table:
    """Hits by row.

    risks, scores  what orders them, in [0, 1], and what a fixed threshold sees
    wrong          whether the approximate answer is
    computed       share of the prompt that the approximate run computes, 0 where it is a stored answer
    late           the risk is known only once the approximate run has begun: what is refused then has been computed
    """

    name: str
    risks: NDArray[np.float64]
    scores: NDArray[np.float64]
    wrong: NDArray[np.bool_]
    computed: NDArray[np.float64]
    late: bool = False

    @property
    def times(self) -> NDArray[np.float64]:
        """What trying a hit takes before its risk is known, as a share of full computation."""
        return self.computed * self.late

    def work(self, hits: NDArray[Any]) -> float:
        """Mean work for a hit if those are served, full computation being 1."""
        refused = 1 + self.times
        return float(np.where(hits, self.computed, refused).mean())

    def __len__(self) -> int:
        return len(self.wrong)


def orders_of(rows: int, orders: int, length: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Row numbers `[orders, steps]`: each order has every row once, or `length` rows drawn with replacement if it is not 0."""
    if length:
        return random.integers(rows, size=(orders, length))
    return random.permuted(np.tile(np.arange(rows), (orders, 1)), axis=1)


def interval(wrong: float, served: float) -> tuple[float, float]:
    """The 95% interval of a share (Clopper and Pearson, 1934)."""
    if not served:
        return 0.0, 1.0
    low = beta.ppf(0.025, wrong, served - wrong + 1) if wrong else 0.0
    high = beta.ppf(0.975, wrong + 1, served - wrong) if wrong < served else 1.0
    return float(low), float(high)


def error_under(risks: NDArray[Any], wrong: NDArray[Any], cutoffs: NDArray[Any]) -> NDArray[np.float64]:
    """The share of wrong hits among those of at most each cutoff; 0 where there is none."""
    order = np.argsort(risks)
    counts = np.searchsorted(risks[order], cutoffs, side="right")
    bad = np.concatenate(([0], np.cumsum(wrong[order])))[counts]
    return bad / np.maximum(counts, 1)


def gate_row(table: Table, terms: Terms, orders: int, length: int, seed: int) -> dict[str, Any]:
    """The figures of the gate, over all orders."""
    random = np.random.default_rng(seed)
    parts: list[dict[str, NDArray[Any]]] = []
    for first in range(0, orders, BATCH):
        rows = orders_of(len(table), min(BATCH, orders - first), length, random)
        wrong = table.wrong[rows]
        played = replayed(table.risks[rows], wrong, terms, random, table.times[rows])
        parts.append(_outcome(table, rows, played, terms))
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    steps, served, bad = length or len(table), found["served"].mean(), found["wrong"].mean()
    opened = found["first"] < steps
    return {
        "method": "gate",
        "violated": float(found["violated"].mean()),
        "opened": float(opened.mean()),
        "first": float(np.median(found["first"][opened])) if opened.any() else None,
        "hits": served / steps,
        "error": bad / served if served else None,
        "interval": interval(bad, served),
        "labels": float(found["labelled"].mean()),
        "twice": float(found["labelled"].mean()) / steps,
        "work": float(found["work"].mean()),
    }


def _outcome(table: Table, rows: NDArray[Any], found: Replayed, terms: Terms) -> dict[str, NDArray[Any]]:
    errors = np.zeros(rows.shape)
    for most in np.unique(found.time).tolist():
        then, rule = found.time == most, table.times < most
        errors[then] = error_under(table.risks[rule], table.wrong[rule], found.cutoff[then])
    wrong, computed, steps = table.wrong[rows], table.computed[rows], rows.shape[1]
    refused = 1 + np.where(table.times[rows] < found.time, table.times[rows], 0.0)
    work = np.where(found.labelled, 1 + computed, np.where(found.served, computed, refused))
    return {
        "violated": np.any((found.cutoff >= 0) & (errors > terms.delta), axis=1),
        "first": np.where(found.served.any(axis=1), found.served.argmax(axis=1), steps),
        "served": found.served.sum(axis=1),
        "wrong": (found.served & wrong).sum(axis=1),
        "labelled": found.labelled.sum(axis=1),
        "work": work.mean(axis=1),
    }


def loosest(values: NDArray[Any], wrong: NDArray[Any], delta: float) -> float:
    """The lowest threshold whose hits are wrong in at most delta of all; infinite if there is none."""
    order = np.argsort(-values, kind="stable")
    known = values[order]
    last = np.append(known[1:] != known[:-1], True)  # equal values are served together
    good = last & (np.cumsum(wrong[order]) <= delta * np.arange(1, len(order) + 1))
    return float(known[np.flatnonzero(good)[-1]]) if good.any() else np.inf


def static_row(table: Table, delta: float, ordered: str, orders: int, length: int, seed: int) -> dict[str, Any]:
    """A threshold on the score, or on minus the risk, chosen on the first half of each order, where all is labelled, and applied to
    the second."""
    values = table.scores if ordered == "score" else -table.risks
    random = np.random.default_rng(seed)
    served, bad, violated = [], [], []
    steps = length or len(table)
    for rows in orders_of(len(table), orders, length, random):
        half = steps // 2
        least = loosest(values[rows[:half]], table.wrong[rows[:half]], delta)
        hits = rows[half:][values[rows[half:]] >= least]
        served.append(len(hits))
        bad.append(int(table.wrong[hits].sum()))
        under = table.wrong[values >= least]
        violated.append(bool(len(under)) and under.mean() > delta)
    named = f"threshold on the {ordered}, chosen on the first half"
    return {**_threshold_row(named, served, bad, violated, steps), "labels": steps // 2, "twice": steps // 2 / steps}


def hindsight_row(table: Table, delta: float) -> dict[str, Any]:
    """The best threshold on the risk in hindsight: no rule of that order can keep more hits."""
    hits = -table.risks >= loosest(-table.risks, table.wrong, delta)
    bad = int(table.wrong[hits].sum())
    row = _threshold_row("best threshold on the risk in hindsight", [int(hits.sum())], [bad], [False], len(table))
    return {**row, "work": table.work(hits)}


def _threshold_row(method: str, served: list[int], bad: list[int], violated: list[bool], steps: int) -> dict[str, Any]:
    hits, errors = float(np.mean(served)), float(np.mean(bad))
    return {
        "method": method,
        "violated": float(np.mean(violated)),
        "opened": float(np.mean(np.array(served) > 0)),
        "first": None,
        "hits": hits / steps,
        "error": errors / hits if hits else None,
        "interval": interval(errors, hits),
        "labels": None,
        "twice": None,
        "work": None,
    }
