"""Figures with their 95% intervals: shares, and how well a score tells two groups apart."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dejakv.experiments.scoring import percentile, wilson

RESAMPLED = 1000
"""Bootstrap samples of an interval."""


@dataclass(frozen=True)
class Share:
    """`count` of `of`, with its Wilson interval."""

    count: int
    of: int

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.count, self.of)

    def __str__(self) -> str:
        if not self.of:
            return "none tried"
        low, high = self.interval
        return f"{self.count}/{self.of} ({low:.0%} to {high:.0%})"

    def as_dict(self) -> dict[str, Any]:
        return {"count": self.count, "of": self.of, "interval": list(self.interval)}


@dataclass(frozen=True)
class Estimate:
    """A value with its bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"

    def as_dict(self) -> dict[str, Any]:
        return {"value": self.value, "interval": [self.low, self.high]}


Figure = Share | Estimate | int | float | str


def plain(figure: Figure) -> Any:
    """A figure as JSON holds it."""
    return figure.as_dict() if isinstance(figure, Share | Estimate) else figure


def auc(less: Sequence[float], more: Sequence[float]) -> float:
    """How often a value of `less` is below one of `more`, ties counted half; 0.5 is a coin. In [0, 1]."""
    pairs = [(one, other) for one in less for other in more]
    return sum((one < other) + 0.5 * (one == other) for one, other in pairs) / len(pairs)


def auc_estimate(less: Sequence[float], more: Sequence[float], rng: random.Random) -> Estimate:
    """The same with an interval: both groups are resampled (Efron, 1979). Neither may be empty."""
    import numpy as np

    below, above = np.asarray(less)[:, None], np.asarray(more)[None, :]
    wins = (below < above) + 0.5 * (below == above)
    draws = np.random.default_rng(rng.randrange(2**32))
    values: list[float] = []
    for _ in range(RESAMPLED):
        rows, columns = draws.integers(0, len(less), len(less)), draws.integers(0, len(more), len(more))
        values.append(float(wins[rows][:, columns].mean()))
    return Estimate(float(wins.mean()), percentile(values, 0.025), percentile(values, 0.975))


def mean_estimate(values: Sequence[float], rng: random.Random) -> Estimate:
    """The mean of cases that were drawn apart, with its bootstrap interval. At least one case."""
    means = [sum(rng.choices(values, k=len(values))) / len(values) for _ in range(RESAMPLED)]
    return Estimate(sum(values) / len(values), percentile(means, 0.025), percentile(means, 0.975))
