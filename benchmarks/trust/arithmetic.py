"""Labels that a bound needs, by simulation beside the least possible, and how soon a rise of wrong answers is noticed."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from dejakv.trust import drift
from dejakv.trust.evidence import log_wealth

STREAMS = 400
AUDITED = 0.02
"""Share of served hits that are audited."""


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


def delay(delta: float, rate: float, streams: int, seed: int) -> tuple[float, float]:
    """Medians over simulated streams: audits until the alarm, and served hits, of which `AUDITED` are audited, and all while drift is
    suspected; infinite beyond 20,000 audits."""
    random = np.random.default_rng(seed)
    found: list[tuple[float, float]] = []
    for _ in range(streams):
        statistics, hits = drift.begin(), 0
        found.append((np.inf, np.inf))
        for audits in range(1, 20_001):
            hits += 1 if drift.warning(statistics) else int(random.geometric(AUDITED))
            statistics = drift.audited(statistics, bool(random.random() < rate), delta)
            if drift.alarm(statistics):
                found[-1] = (audits, hits)
                break
    audits, hits = np.median(found, axis=0).tolist()
    return audits, hits


def least_possible(delta: float, confidence: float = 0.95, wrong_share: float = 0.0) -> float:
    """Labels that the best test against `delta` takes on average, one that knows the share of wrong answers; infinite at `delta`.

    The log of 1 / (1 - confidence) over the divergence of the two shares (Wald, 1945).
    """
    right = (1 - wrong_share) * math.log((1 - wrong_share) / (1 - delta))
    wrong = wrong_share * math.log(wrong_share / delta) if wrong_share else 0.0
    return -math.log(1 - confidence) / (right + wrong) if right + wrong > 0 else math.inf


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
    yield "| delta | share of wrong answers rises to | audits until the alarm | served hits | wrong ones, about |"
    yield "|---|---|---:|---:|---:|"
    for delta in bounds:
        for rate in sorted({2 * delta, 5 * delta, 0.2, 0.5}):
            audits, hits = delay(delta, rate, 100, seed)
            yield f"| {delta:.0%} | {rate:.0%} | {_count(audits)} | {_count(hits)} | {_count(hits * rate)} |"


def _count(value: float) -> str:
    return f"{value:,.0f}" if np.isfinite(value) else "none"
