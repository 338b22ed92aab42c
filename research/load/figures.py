"""From the rows of a run to every figure of its report.

`by_prefix` is a value of an arm divided by prefix caching's.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from dejakv.experiments.summary import percentile

ARMS = ("prefix", "exact", "blend")
"""Prefix caching alone, with which the others are compared; and the connector's modes."""
BASE, BLEND = ARMS[0], ARMS[-1]
ALL_AT_ONCE = "all"
"""The load of a phase whose requests arrive together: it measures what an arm can take."""
LOST = "load_failures: the load"
"""Counters of loads that were thrown away after work was spent on them: they took too long, or
failed.
"""

Row = dict[str, Any]
Runs = dict[str, list[Row]]
"""Rows by arm, one a round."""


def figures(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """A cell for each workload and load.

    All cells of a workload have its capacity, of the phase in which requests arrive together.

    `failed` and `errors` are of every arm. An arm of which a request failed has no other figure;
    prefix caching alone is never one.
    """
    made: dict[str, dict[str, Row]] = {}
    for name, some in _by(rows, "workload").items():
        loads = {load: _by(runs, "arm") for load, runs in _by(some, "load").items()}
        capacities = _compared("capacity", "per_second", _whole(loads[ALL_AT_ONCE]), _mean_capacity)
        made[name] = {load: {**_cell(runs), **capacities} for load, runs in loads.items()}
    return made


def capacity(row: Row) -> float:
    """Requests a second of a phase, from its first arrival to its last token."""
    return len(row["requests"]) / max(one["due"] + one["times"][-1] for one in row["requests"])


def errors_of(rows: Sequence[Row]) -> list[str]:
    """Return the error of each request that failed."""
    return [one["error"] for row in rows for one in row["requests"] if one["error"]]


def _by(rows: Sequence[Row], name: str) -> Runs:
    made: Runs = {}
    for row in rows:
        made.setdefault(row[name], []).append(row)
    return made


def _whole(runs: Runs) -> Runs:
    """The arms of which no request failed."""
    return {arm: rows for arm, rows in runs.items() if not errors_of(rows)}


def _mean_capacity(rows: Sequence[Row]) -> float:
    return statistics.fmean(map(capacity, rows))


def _cell(every: Runs) -> Row:
    """One workload at one load."""
    runs = _whole(every)
    errors = {arm: errors_of(every[arm]) for arm in ARMS}
    blendable = [
        one["cached"] > one["prefix"]
        for row in runs.get(BLEND, ())
        for one in row["requests"]
        if one["blendable"]
    ]
    blended = statistics.fmean(blendable) if blendable else None
    counters = {
        arm: sum((Counter(row["counters"]) for row in every[arm]), Counter[str]())
        for arm in ARMS[1:]
    }
    made: Row = {
        "rounds": len(every[BASE]),
        "requests": sum(len(row["requests"]) for row in every[BASE]),
        "offered_per_second": every[BASE][0]["rate"],
        "failed": {arm: len(found) for arm, found in errors.items()},
        "errors": {arm: sorted(set(found)) for arm, found in errors.items() if found},
        **_latencies(runs, stranger=False),
        "first_tokens_equal": _equal(runs, slice(1)),
        "answers_equal": _equal(runs, slice(None)),
        "blendable": len(blendable),
        "blended": blended,
        "refused": None if blended is None else 1 - blended,
        "loads_thrown_away": {
            arm: int(sum(many for name, many in found.items() if name.startswith(LOST)))
            for arm, found in counters.items()
        },
        "counters": counters,
    }  # fmt: skip
    if any(one["stranger"] for row in every[BASE] for one in row["requests"]):
        made["strangers"] = _latencies(runs, stranger=True)
    return made


def _latencies(runs: Runs, stranger: bool) -> Row:
    """Return latencies of the prompts that share nothing, or of the others."""

    def times(rows: Sequence[Row]) -> list[list[float]]:
        return [
            one["times"] for row in rows for one in row["requests"] if one["stranger"] == stranger
        ]

    def ttft(rows: Sequence[Row], share: float) -> float:
        return percentile([1e3 * one[0] for one in times(rows)], share)

    def itl(rows: Sequence[Row], share: float) -> float:
        return percentile(
            [1e3 * (after - before) for one in times(rows) for before, after in pairwise(one)],
            share,
        )

    return {
        "ttft_spread_ms": {
            arm: {f"p{share}": ttft(rows, share / 100) for share in (10, 50, 90)}
            for arm, rows in runs.items()
        },
        **_compared("ttft_p50", "ms", runs, lambda rows: ttft(rows, 0.5)),
        **_compared("ttft_p95", "ms", runs, lambda rows: ttft(rows, 0.95)),
        **_compared("itl_p99", "ms", runs, lambda rows: itl(rows, 0.99)),
    }


def _compared(name: str, unit: str, runs: Runs, value: Callable[[Sequence[Row]], float]) -> Row:
    """A value over all rounds by arm, its ratio, and the ratio of each round."""
    values = {arm: value(rows) for arm, rows in runs.items()}
    rounds = {
        arm: [
            value([row]) / value([plain]) for row, plain in zip(runs[arm], runs[BASE], strict=True)
        ]
        for arm in runs
        if arm != BASE
    }
    return {
        f"{name}_{unit}": values,
        f"{name}_by_prefix": {arm: values[arm] / values[BASE] for arm in rounds},
        f"{name}_by_prefix_rounds": rounds,
    }


def _equal(runs: Runs, tokens: slice) -> dict[str, float]:
    """The share of requests of which these tokens equal prefix caching's, by arm."""
    return {
        arm: statistics.fmean(
            one["ids"][tokens] == base["ids"][tokens]
            for row, plain in zip(runs[arm], runs[BASE], strict=True)
            for one, base in zip(row["requests"], plain["requests"], strict=True)
        )
        for arm in runs
        if arm != BASE
    }
