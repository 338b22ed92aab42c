"""One class's hits in many orders at once: what a gate would have done with each, step by step as `evidence.State` does it.

Labels are there at once, and nothing is lost.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.trust import drift
from dejakv.trust.evidence import Terms, log_wealth
from dejakv.trust.rules import PILOT, QUANTILES, cutoffs_of, times_of, weights_of

_NO_RULE = 2.0
"""A cutoff that no rule has, where an order has fewer rules than others."""


@dataclass(frozen=True)
class Replayed:
    """What happened in each order at each step, `[orders, steps]`.

    served, labelled  as in a `Draw`
    cutoff, time      of the loosest rule that was open when the hit came: the largest risk that it serves, and what a try must take less
                      than; -1 while the gate was closed
    alarms            whether drift closed the gate with this hit's label
    """

    served: NDArray[np.bool_]
    labelled: NDArray[np.bool_]
    cutoff: NDArray[np.float64]
    time: NDArray[np.float64]
    alarms: NDArray[np.bool_]


def replayed(
    risks: NDArray[np.float64],
    wrong: NDArray[np.bool_],
    terms: Terms,
    random: np.random.Generator,
    times: NDArray[np.float64] | None = None,
) -> Replayed:
    """What a gate does with hits of these risks, of which some would be wrong, and of which a try takes these shares of the exact
    plan's time (None: nothing, the risk being known before); all `[orders, steps]`."""
    orders, steps = risks.shape
    gates = _Gates(orders, terms)
    chances: NDArray[np.float64] = random.random((orders, steps))
    found = Replayed(
        np.zeros((orders, steps), bool), np.zeros((orders, steps), bool), np.full((orders, steps), -1.0),
        np.full((orders, steps), -1.0), np.zeros((orders, steps), bool),
    )  # fmt: skip
    takes = np.zeros(risks.shape) if times is None else times
    for step in range(steps):
        found.cutoff[:, step], found.time[:, step] = gates.open_rule()
        result = gates.step(risks[:, step], takes[:, step], wrong[:, step], chances[:, step])
        found.served[:, step], found.labelled[:, step], found.alarms[:, step] = result
    return found


class _Gates:
    """States of many gates, one a row."""

    def __init__(self, orders: int, terms: Terms) -> None:
        rules = len(QUANTILES) + 1
        self._terms = terms
        self._rules = np.arange(rules)
        self._pilots = np.zeros((orders, PILOT))
        self._seen = np.zeros(orders, int)
        self._cutoffs = np.full((orders, rules), _NO_RULE)
        self._times = np.full((orders, rules), np.inf)
        self._weights = np.zeros((orders, rules))
        self._opened = np.zeros(orders, int)
        self._best = np.zeros((orders, rules))
        self._drift = np.zeros((orders, len(drift.begin())))
        self._suspicious = drift.WARNING * drift.RUN_LENGTH * len(drift.begin())
        # labels and wrong ones by band, of full and of light weight
        self._tallies = np.zeros((6, orders, rules))

    def open_rule(self) -> tuple[NDArray[np.float64], ...]:
        """Cutoff and time of the loosest open rule."""
        last = np.maximum(self._opened - 1, 0)[:, None]
        bounds = (np.take_along_axis(kept, last, 1)[:, 0] for kept in (self._cutoffs, self._times))
        return tuple(np.where(self._opened > 0, bound, -1.0) for bound in bounds)

    def step(
        self, risks: NDArray[Any], times: NDArray[Any], wrong: NDArray[Any], chances: NDArray[Any]
    ) -> tuple[NDArray[Any], ...]:
        """One hit of each order: whether it is served, whether it is labelled, whether its label raised an alarm."""
        ready = self._seen >= PILOT
        bands = np.sum((self._cutoffs < risks[:, None]) | (self._times <= times[:, None]), axis=1)
        served = ready & (bands < self._opened)
        warned = (self._opened > 0) & (self._drift.sum(axis=1) >= self._suspicious)
        audit = np.where(warned, 1.0, self._terms.audit)
        labelled = ready & (chances < np.where(served, audit, self._terms.explore))
        alarms = self._audit(np.flatnonzero(served & labelled), wrong)
        self._learn(np.flatnonzero(labelled & ~alarms), bands, wrong, warned)
        self._restart(np.flatnonzero(alarms))
        self._pilot(np.flatnonzero(~ready), risks)
        return served, labelled, alarms

    def _audit(self, rows: NDArray[Any], wrong: NDArray[Any]) -> NDArray[np.bool_]:
        alarms = np.zeros(len(self._seen), bool)
        for row in rows.tolist():
            self._drift[row] = drift.audited(self._drift[row].tolist(), bool(wrong[row]), self._terms.delta)
            alarms[row] = drift.alarm(self._drift[row].tolist())
        return alarms

    def _learn(self, rows: NDArray[Any], bands: NDArray[Any], wrong: NDArray[Any], warned: NDArray[Any]) -> None:
        if not rows.size:
            return
        terms, band, opened, bad = self._terms, bands[rows, None], self._opened[rows, None], wrong[rows, None]
        own, under = band == self._rules, band <= self._rules
        under &= ~warned[rows, None] | (self._rules < opened)
        light = under & (opened > 0) & (opened <= self._rules) & ((terms.explore > terms.audit) == (band >= opened))
        light &= terms.explore != terms.audit
        full = under & ~light
        for number, mask in enumerate((own, own & bad, full, full & bad, light, light & bad)):
            self._tallies[number][rows] += mask
        own_n, own_bad, full_n, full_bad, light_n, light_bad = self._tallies[:, rows]
        by_band = np.minimum.accumulate(log_wealth(own_n, own_bad, terms.delta), axis=1)
        nested = log_wealth(
            full_n, full_bad, terms.delta, light_labels=light_n, light_wrong=light_bad, weight=terms.light
        )
        self._best[rows] = np.maximum(self._best[rows], np.logaddexp(by_band, nested) - np.log(2))
        self._opened[rows] = self._open(rows)

    def _open(self, rows: NDArray[Any]) -> NDArray[np.int64]:
        """`rules.open_rules` for many."""
        opened, passed = np.zeros(rows.size, int), np.zeros(rows.size)
        for rule in self._rules.tolist():
            weight = self._weights[rows, rule] + passed
            proven = (weight > 0) & (self._best[rows, rule] >= self._terms.needed - np.log(np.maximum(weight, 1e-300)))
            proven &= self._cutoffs[rows, rule] < _NO_RULE
            passed = np.where(proven, weight, 0.0)
            opened = np.where(proven, rule + 1, opened)
        return opened

    def _restart(self, rows: NDArray[Any]) -> None:
        self._seen[rows] = self._opened[rows] = 0
        self._cutoffs[rows] = _NO_RULE
        self._times[rows] = np.inf
        self._best[rows] = self._drift[rows] = 0.0
        self._tallies[:, rows] = 0

    def _pilot(self, rows: NDArray[Any], risks: NDArray[Any]) -> None:
        self._pilots[rows, self._seen[rows]] = risks[rows]
        self._seen[rows] += 1
        for row in rows[self._seen[rows] == PILOT].tolist():
            cutoffs = cutoffs_of(self._pilots[row].tolist())
            self._cutoffs[row, : len(cutoffs)] = cutoffs
            self._times[row, : len(cutoffs)] = times_of(len(cutoffs))
            self._weights[row] = 0.0
            self._weights[row, : len(cutoffs)] = weights_of(len(cutoffs))
