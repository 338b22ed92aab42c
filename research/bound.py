"""`python -m research.bound TABLE`: what the error bound makes of a table of labelled hits.

It is replayed in many random orders at once.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from dejakv.trust import drift
from dejakv.trust.evidence import EvidenceTerms, log_wealth
from dejakv.trust.features import LATE_BLEND, LATE_CUTOFFS, risk_of
from dejakv.trust.rules import LONG_TRY, PILOT, QUANTILES, cutoffs_of, weights_of
from dejakv.trust.settings import TrustSettings
from research.command import run

_NO_RULE = 2.0
"""A cutoff that no rule has, where an order has fewer rules than others."""


@dataclass(frozen=True)
class Replayed:
    """What happened in each order at each step, `[orders, steps]`.

    served, labelled  as in a `Draw`
    cutoff, time      of the loosest rule that was open when the hit came: the largest risk that it
                      serves, and what a try must take less than; -1 while the gate was closed
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
    terms: EvidenceTerms,
    random: np.random.Generator,
    times: NDArray[np.float64] | None = None,
    cutoffs: Sequence[float] = (),
) -> Replayed:
    """Replay hits of these risks through a gate.

    Parameters
    ----------
    risks, wrong : array, shape [orders, steps]
        Risk of each hit, and whether its answer would be wrong.
    terms : EvidenceTerms
        Terms of the bound.
    random : numpy.random.Generator
        Source of chance.
    times : array, shape [orders, steps], optional
        Share of the exact plan's time that a try takes; None: nothing, the risk being known before.
    cutoffs : sequence of float
        Cutoffs fixed in advance; by default a pilot chooses them.
    """
    orders, steps = risks.shape
    gates = _Gates(orders, terms, cutoffs)
    chances: NDArray[np.float64] = random.random((orders, steps))
    found = Replayed(
        np.zeros((orders, steps), bool), np.zeros((orders, steps), bool),
        np.full((orders, steps), -1.0),
        np.full((orders, steps), -1.0), np.zeros((orders, steps), bool),
    )  # fmt: skip
    takes = np.zeros(risks.shape) if times is None else times
    for step in range(steps):
        found.cutoff[:, step], found.time[:, step] = gates.open_rule()
        result = gates.step(risks[:, step], takes[:, step], wrong[:, step], chances[:, step])
        found.served[:, step], found.labelled[:, step], found.alarms[:, step] = result
    return found


class _Gates:
    """States of many gates, one in each row."""

    def __init__(self, orders: int, terms: EvidenceTerms, cutoffs: Sequence[float]) -> None:
        rules = len(cutoffs or QUANTILES) + (not cutoffs)
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
        self._fixed = cutoffs
        self._rule(np.arange(orders) if cutoffs else np.arange(0), cutoffs)

    def open_rule(self) -> tuple[NDArray[np.float64], ...]:
        """Return cutoff and time of the loosest open rule."""
        last = np.maximum(self._opened - 1, 0)[:, None]
        bounds = (np.take_along_axis(kept, last, 1)[:, 0] for kept in (self._cutoffs, self._times))
        return tuple(np.where(self._opened > 0, bound, -1.0) for bound in bounds)

    def step(
        self, risks: NDArray[Any], times: NDArray[Any], wrong: NDArray[Any], chances: NDArray[Any]
    ) -> tuple[NDArray[Any], ...]:
        """Take one hit of each order.

        Returns
        -------
        tuple of arrays, shape [orders]
            Whether it is served, whether it is labelled, whether its label raised an alarm.
        """
        ready = self._cutoffs[:, 0] < _NO_RULE
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
            self._drift[row] = drift.audited(
                self._drift[row].tolist(), bool(wrong[row]), self._terms.delta
            )
            alarms[row] = drift.alarm(self._drift[row].tolist())
        return alarms

    def _learn(
        self, rows: NDArray[Any], bands: NDArray[Any], wrong: NDArray[Any], warned: NDArray[Any]
    ) -> None:
        if not rows.size:
            return
        terms, band, opened, bad = (
            self._terms,
            bands[rows, None],
            self._opened[rows, None],
            wrong[rows, None],
        )
        own, under = band == self._rules, band <= self._rules
        under &= ~warned[rows, None] | (self._rules < opened)
        light = (
            under
            & (opened > 0)
            & (opened <= self._rules)
            & ((terms.explore > terms.audit) == (band >= opened))
        )
        light &= terms.explore != terms.audit
        full = under & ~light
        for number, mask in enumerate((own, own & bad, full, full & bad, light, light & bad)):
            self._tallies[number][rows] += mask
        own_n, own_bad, full_n, full_bad, light_n, light_bad = self._tallies[:, rows]
        by_band = np.minimum.accumulate(log_wealth(own_n, own_bad, terms.delta), axis=1)
        nested = log_wealth(
            full_n,
            full_bad,
            terms.delta,
            light_labels=light_n,
            light_wrong=light_bad,
            weight=terms.light,
        )
        self._best[rows] = np.maximum(self._best[rows], np.logaddexp(by_band, nested) - np.log(2))
        self._opened[rows] = self._open(rows)

    def _open(self, rows: NDArray[Any]) -> NDArray[np.int64]:
        """Apply `rules.open_rules` to many gates."""
        opened, passed = np.zeros(rows.size, int), np.zeros(rows.size)
        for rule in self._rules.tolist():
            weight = self._weights[rows, rule] + passed
            proven = (weight > 0) & (
                self._best[rows, rule] >= self._terms.needed - np.log(np.maximum(weight, 1e-300))
            )
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
        self._rule(rows if self._fixed else rows[:0], self._fixed)

    def _pilot(self, rows: NDArray[Any], risks: NDArray[Any]) -> None:
        self._pilots[rows, self._seen[rows]] = risks[rows]
        self._seen[rows] += 1
        for row in rows[self._seen[rows] == PILOT].tolist():
            self._rule(np.array([row]), cutoffs_of(self._pilots[row].tolist()))

    def _rule(self, rows: NDArray[Any], cutoffs: Sequence[float]) -> None:
        if not rows.size:
            return
        self._weights[rows] = 0.0
        self._cutoffs[rows, : len(cutoffs)] = cutoffs
        self._times[rows, : len(cutoffs) - 1] = LONG_TRY
        self._weights[rows, : len(cutoffs)] = weights_of(len(cutoffs))


@dataclass(frozen=True)
class Table:
    """Labelled hits by row.

    Attributes
    ----------
    wrong : array, shape [hits]
        Whether each would be wrong.
    risks : array, shape [hits]
        Risk of each.
    computed : array, shape [hits]
        What trying it takes, as a share of full computation.
    late : bool
        Whether the risk is known only after the try.
    cutoffs : tuple[float, ...]
        Cutoffs for `replayed`.
    """

    wrong: NDArray[np.bool_]
    risks: NDArray[np.float64]
    computed: NDArray[np.float64]
    late: bool
    cutoffs: tuple[float, ...]

    @property
    def times(self) -> NDArray[np.float64]:
        return self.computed * self.late


def table_of(hits: Sequence[Mapping[str, Any]], differs: str, ordered: str) -> Table:
    """Return the table of some hits; `ordered` is a name of `ORDERED`."""
    late = ordered != "plan"
    risks = [
        (
            risk_of(LATE_BLEND, {"first_margin": hit["margin"]})
            if late
            else risk_of("blend", hit["features"])
        )
        for hit in hits
    ]
    return Table(
        np.array([hit["wrong"][differs] for hit in hits]),
        np.array(risks),
        np.array([hit["computed_tokens"] / hit["prompt_tokens"] for hit in hits]),
        late,
        LATE_CUTOFFS if ordered == "margin" else (),
    )


ORDERED = {
    "margin": "margin of the first token, cutoffs fixed",
    "pilot": "the same, a pilot's cutoffs",
    "plan": "the plan, a pilot's cutoffs",
}


CHECKED = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Shares of hits that a check computes in full."""


def figures(
    table: Table, terms: EvidenceTerms, orders: int, length: int, seed: int
) -> dict[str, float]:
    """Over all orders; `length` hits drawn with replacement in each, 0: every hit once.

    broke   orders in which a rule opened whose share of wrong answers on the table is above the
            bound
    opened  orders in which a rule opened, and `first`, the median of hits until then
    kept    share of the hits that were served, and `wrong` of these
    time    mean time of a request, full computation being 1: what was tried in vain included,
            labels in idle time not; `time_late` of the last fifth of the hits
    """
    random = np.random.default_rng(seed)
    rows = (
        random.integers(len(table.wrong), size=(orders, length))
        if length
        else random.permuted(np.tile(np.arange(len(table.wrong)), (orders, 1)), axis=1)
    )
    wrong, times = table.wrong[rows], table.times[rows]
    found = replayed(table.risks[rows], wrong, terms, random, times, table.cutoffs)
    broke = np.zeros(orders, bool)
    for cutoff, most in {
        *zip(found.cutoff.ravel().tolist(), found.time.ravel().tolist(), strict=True)
    }:
        under = (table.risks <= cutoff) & (table.times < most)
        if under.any() and table.wrong[under].mean() > terms.delta:
            broke |= np.any((found.cutoff == cutoff) & (found.time == most), axis=1)
    took = np.where(
        found.served, table.computed[rows], 1 + np.where(times < found.time, times, 0.0)
    )
    opened = found.cutoff.max(axis=1) >= 0
    return {
        "broke": float(broke.mean()),
        "opened": float(opened.mean()),
        "first": (
            float(np.median((found.cutoff >= 0).argmax(axis=1)[opened]))
            if opened.any()
            else math.nan
        ),
        "kept": float(found.served.mean()),
        "wrong": float((found.served & wrong).sum() / max(1, found.served.sum())),
        "time": float(took.mean()),
        "time_late": float(took[:, -(rows.shape[1] // 5) :].mean()),
    }


def bound(
    table: Annotated[Path, typer.Argument(help="File of labelled hits, JSON lines.")],
    orders: Annotated[int, typer.Option(min=1, help="Random orders.")] = 1000,
    length: Annotated[
        int, typer.Option(help="Hits drawn with replacement in each order; 0: every hit once.")
    ] = 0,
    differs: Annotated[str, typer.Option(help="What is wrong: a key of `wrong`.")] = "first",
    error_bound: Annotated[
        list[float] | None, typer.Option(help="Repeatable (default: .01, .02, .05).")
    ] = None,
    seed: int = 0,
) -> None:
    """Replay labelled hits through the error bound, and print what it keeps and if it breaks."""
    hits = [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]
    typer.echo(
        "| ordered by | bound | broke it | opened | first after | kept | wrong of these | time | of"
        " the last fifth |\n" + "|---" * 9 + "|"
    )
    for ordered, name in ORDERED.items():
        for delta in error_bound or (0.01, 0.02, 0.05):
            got = figures(
                table_of(hits, differs, ordered),
                EvidenceTerms.from_settings(TrustSettings(error_bound=delta)),
                orders,
                length,
                seed,
            )
            shares = " | ".join(f"{got[key]:.1%}" for key in ("broke", "opened"))
            kept = (
                f"{got['kept']:.1%} | {got['wrong']:.2%} | {got['time']:.3f} |"
                f" {got['time_late']:.3f}"
            )
            typer.echo(f"| {name} | {delta:.0%} | {shares} | {got['first']:.0f} | {kept} |")
    typer.echo("\n" + checked(hits, differs))


def checked(hits: Sequence[Mapping[str, Any]], differs: str) -> str:
    """Return a Markdown table of a fixed check in place of a bound.

    Blends with the smallest margins of the first token are computed in full after all, and both are
    paid for. The shares are of all hits; `computed` is of full computation's tokens.
    """
    lines = [
        (
            "| computed in full | margin below, nats | wrong of all | wrong of the blended |"
            " computed |"
        ),
        "|---" * 5 + "|",
    ]
    wrong = np.array([hit["wrong"][differs] for hit in hits])
    margins = np.array([hit["margin"] for hit in hits])
    computed = float(np.mean([hit["computed_tokens"] / hit["prompt_tokens"] for hit in hits]))
    for share in CHECKED:
        cutoff = float(np.quantile(margins, share))
        kept = wrong[margins >= cutoff]
        full = 1 - len(kept) / len(hits)
        lines.append(
            f"| {full:.0%} | {cutoff:.2f} | {kept.sum() / len(hits):.1%} | {kept.mean():.1%} |"
            f" {computed + full:.0%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run(bound)
