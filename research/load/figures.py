"""From the rows of a run to every figure of its report. `by_prefix` is a value of an arm divided by prefix caching's."""

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
"""Counters of loads that were thrown away after work was spent on them: they took too long, or failed."""

Row = dict[str, Any]


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """`workloads` by name and load, `exact_hits`, and `misses` by model; what was not measured is left out."""
    parts = _by(rows, "part")
    made: dict[str, Any] = {}
    if "load" in parts:
        workloads = _by(parts["load"], "workload")
        made["workloads"] = {
            name: {load: _cell(_by(runs, "arm")) for load, runs in _by(some, "load").items()}
            for name, some in workloads.items()
        }
    if "exact" in parts:
        made["exact_hits"] = _exact_hits(parts["exact"])
    if "misses" in parts:
        made["misses"] = {name: _misses(_by(some, "arm")) for name, some in _by(parts["misses"], "model").items()}
    return made


def capacity(row: Row) -> float:
    """Requests a second of a phase, from its first arrival to its last token."""
    return len(row["requests"]) / max(one["due"] + one["times"][-1] for one in row["requests"])


def _by(rows: Sequence[Row], name: str) -> dict[str, list[Row]]:
    made: dict[str, list[Row]] = {}
    for row in rows:
        made.setdefault(row[name], []).append(row)
    return made


def _cell(runs: dict[str, list[Row]]) -> Row:
    """One workload at one load; by arm its phases, one a round."""
    requests = [one for row in runs[BASE] for one in row["requests"]]
    made: Row = {
        "requests": len(requests),
        "offered_per_second": runs[BASE][0]["rate"],
        **_compared("capacity", runs, lambda some: statistics.fmean(map(capacity, some)), unit="per_second"),
        **_latencies(runs, stranger=False),
    }
    if any(one["stranger"] for one in requests):
        made["strangers"] = _latencies(runs, stranger=True)
    for name, of in (("first_tokens_equal", slice(1)), ("answers_equal", slice(None))):
        made[name] = {
            arm: statistics.fmean(
                one["ids"][of] == base["ids"][of]
                for row, plain in zip(runs[arm], runs[BASE], strict=True)
                for one, base in zip(row["requests"], plain["requests"], strict=True)
            )
            for arm in ARMS[1:]
        }
    blendable = [one["cached"] > one["prefix"] for row in runs[BLEND] for one in row["requests"] if one["blendable"]]
    blended = statistics.fmean(blendable) if blendable else None
    counters = {arm: sum((Counter(row["counters"]) for row in runs[arm]), Counter[str]()) for arm in ARMS[1:]}
    return made | {
        "blendable": len(blendable),
        "blended": blended,
        "refused": None if blended is None else 1 - blended,
        "loads_thrown_away": {
            arm: int(sum(many for name, many in found.items() if name.startswith(LOST))) for arm, found in counters.items()
        },
        "counters": counters,
    }  # fmt: skip


def _latencies(runs: dict[str, list[Row]], stranger: bool) -> Row:
    """Of the prompts that share nothing, or of the others."""

    def ttfts(some: Sequence[Row]) -> list[float]:
        return [1e3 * one["times"][0] for row in some for one in row["requests"] if one["stranger"] == stranger]

    def gaps(some: Sequence[Row]) -> list[float]:
        of = [one["times"] for row in some for one in row["requests"] if one["stranger"] == stranger]
        return [1e3 * (after - before) for times in of for before, after in pairwise(times)]

    spread = {arm: {f"p{share}": percentile(ttfts(runs[arm]), share / 100) for share in (10, 50, 90)} for arm in ARMS}
    return {
        "ttft_spread_ms": spread,
        **_compared("ttft_p50", runs, lambda some: percentile(ttfts(some), 0.5)),
        **_compared("ttft_p95", runs, lambda some: percentile(ttfts(some), 0.95)),
        **_compared("itl_p99", runs, lambda some: percentile(gaps(some), 0.99)),
    }


def _compared(name: str, runs: dict[str, list[Row]], value: Callable[[Sequence[Row]], float], unit: str = "ms") -> Row:
    """A value over all rounds by arm, its ratio, and the ratio of each round."""
    values = {arm: value(runs[arm]) for arm in ARMS}
    rounds = {
        arm: [value([row]) / value([plain]) for row, plain in zip(runs[arm], runs[BASE], strict=True)]
        for arm in ARMS[1:]
    }
    return {
        f"{name}_{unit}": values,
        f"{name}_by_prefix": {arm: values[arm] / values[BASE] for arm in ARMS[1:]},
        f"{name}_by_prefix_rounds": rounds,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _exact_hits(rows: Sequence[Row]) -> Row:
    names = ("hit_ms", "full_ms", "pause_of_hit_ms", "pause_of_full_ms")
    return {
        "turns": len(rows),
        "tokens": rows[0]["tokens"],
        **{name: _spread([row[name] for row in rows]) for name in names},
        "ttft_by_full": _spread([row["hit_ms"] / row["full_ms"] for row in rows]),
        "pause_by_full": _spread([row["pause_of_hit_ms"] / row["pause_of_full_ms"] for row in rows]),
    }


def _misses(runs: dict[str, list[Row]]) -> Row:
    pairs = list(zip(runs[BASE], runs["exact"], strict=True))
    return {
        "pairs": len(pairs),
        "prompts": runs[BASE][0]["prompts"],
        "requests_per_second": {arm: statistics.median(row["requests_per_second"] for row in runs[arm]) for arm in runs},
        "throughput_by_prefix": _spread([row["requests_per_second"] / base["requests_per_second"] for base, row in pairs]),
        "cpu_seconds_by_prefix": _spread([row["cpu_seconds"] / base["cpu_seconds"] for base, row in pairs]),
    }  # fmt: skip
