"""Labels that a bound needs, by simulation beside the least possible, and how soon a rise of wrong answers is noticed."""

from collections.abc import Iterator, Sequence

import numpy as np

from dejakv.trust import drift
from dejakv.trust.arithmetic import least_possible
from dejakv.trust.evidence import log_wealth

STREAMS = 400


def labels_taken(delta: float, wrong_share: float, streams: int, seed: int) -> tuple[float, float, float]:
    """Quarter, half and three quarters of simulated streams have opened after so many labels; infinite where they have not after
    150 / delta."""
    random = np.random.default_rng(seed)
    steps = int(150 / delta)
    first: list[float] = []
    for _ in range(streams):
        wrong = np.cumsum(random.random(steps) < wrong_share)
        enough = log_wealth(np.arange(1, steps + 1), wrong, delta) >= -np.log(0.05)
        first.append(float(enough.argmax() + 1) if enough.any() else np.inf)
    return tuple(np.quantile(first, [0.25, 0.5, 0.75], method="inverted_cdf").tolist())


def audits_taken(delta: float, rate: float, streams: int, seed: int) -> float:
    """Half of simulated streams have alarmed after so many audits; infinite beyond 20,000."""
    random = np.random.default_rng(seed)
    first: list[float] = []
    for _ in range(streams):
        statistics = drift.begin()
        first.append(np.inf)
        for number in range(1, 20_001):
            statistics = drift.audited(statistics, bool(random.random() < rate), delta)
            if drift.alarm(statistics):
                first[-1] = number
                break
    return float(np.median(first))


def lines(bounds: Sequence[float], seed: int) -> Iterator[str]:
    """Two tables."""
    yield "| delta | wrong | least possible | ours, median | a quarter to three quarters of streams |"
    yield "|---|---|---:|---:|---|"
    for delta in bounds:
        for share in (0.0, 0.1, 0.25, 0.5, 0.75):
            low, middle, high = labels_taken(delta, share * delta, 1 if share == 0 else STREAMS, seed)
            least = least_possible(delta, wrong_share=share * delta)
            yield f"| {delta:.0%} | {share:.0%} of delta | {np.ceil(least):,.0f} | {_count(middle)} | {_count(low)} to {_count(high)} |"
    yield ""
    yield "| delta | share of wrong answers rises to | audits until the alarm, median | served hits, 2% audited |"
    yield "|---|---|---:|---:|"
    for delta in bounds:
        for rate in (2 * delta, 5 * delta, 0.2, 0.5):
            audits = audits_taken(delta, rate, 100, seed)
            yield f"| {delta:.0%} | {rate:.0%} | {_count(audits)} | {_count(audits / 0.02)} |"


def _count(value: float) -> str:
    return f"{value:,.0f}" if np.isfinite(value) else "none"
