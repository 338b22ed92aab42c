"""A table in many random orders through the gate, and what came of it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from dejakv.trust.evidence import Terms
from research.trust.replay import Replayed, replayed

BATCH = 250
"""Orders that are replayed at once."""

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Of delays."""


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
    donors: tuple[str, ...] = ()
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


def drift_row(table: Table, terms: Terms, orders: int, length: int, risen: float, seed: int) -> dict[str, Any]:
    """Rows drawn with replacement, `length` with a quarter of the bound wrong and then as many with `risen` wrong: what passes until
    the gate closes, where it was open.

    Of orders in which it does not close: in how many the rule that is open keeps the bound even so (`kept_bound`), since wrong rows
    have other risks; of the others what is wrong of what the rule serves (`missed_error`), and how many audits there were
    (`missed_audits`, medians).
    """
    random = np.random.default_rng(seed)
    right, bad = np.flatnonzero(~table.wrong), np.flatnonzero(table.wrong)
    rates = np.repeat([terms.delta / 4, risen], length)
    rows = np.where(
        random.random((orders, 2 * length)) < rates,
        random.choice(bad, (orders, 2 * length)),
        random.choice(right, (orders, 2 * length)),
    )
    wrong = table.wrong[rows]
    found = replayed(table.risks[rows], wrong, terms, random, table.times[rows])
    delays: list[float] = []
    served: list[int] = []
    errors: list[int] = []
    kept: list[bool] = []
    missed: list[tuple[float, int]] = []
    open_then = found.cutoff[:, length] >= 0
    for order in np.flatnonzero(open_then).tolist():
        after = slice(length, None)
        closed = np.flatnonzero(found.alarms[order, after])
        end = int(closed[0]) + 1 if closed.size else length
        part = slice(length, length + end)
        delays.append(end if closed.size else np.inf)
        if not closed.size:
            error = _error_after(table, float(found.cutoff[order, length]), float(found.time[order, length]), risen)
            kept.append(error <= terms.delta)
            if error > terms.delta:
                missed.append((error, int((found.served[order, part] & found.labelled[order, part]).sum())))
        served.append(int(found.served[order, part].sum()))
        errors.append(int((found.served[order, part] & wrong[order, part]).sum()))
    early = found.alarms[:, :length].any(axis=1).mean()
    return {
        "open": float(open_then.mean()),
        "early_alarms": float(early),
        "noticed": float(np.isfinite(delays).mean()) if delays else None,
        "delay": float(np.median(delays)) if delays else None,
        "delays": [float(value) for value in np.quantile(delays, QUANTILES, method="inverted_cdf")] if delays else None,
        "unnoticed": len(kept),
        "kept_bound": int(sum(kept)),
        "missed_error": float(np.median([error for error, _ in missed])) if missed else None,
        "missed_audits": float(np.median([audits for _, audits in missed])) if missed else None,
        "served": float(np.median(served)) if served else None,
        "wrong_served": float(np.median(errors)) if errors else None,
    }


def _error_after(table: Table, cutoff: float, time: float, risen: float) -> float:
    """What is wrong of the hits that a rule serves, where a share `risen` of all hits is wrong, drawn as in `drift_row`."""
    served = (table.risks <= cutoff) & (table.times < time)
    bad = risen * float(served[table.wrong].mean())
    right = (1 - risen) * float(served[~table.wrong].mean())
    return bad / (bad + right) if bad + right else 0.0
