"""Correctness of an answer, and the intervals of a rate and of means."""

import math
import statistics
import unicodedata
from collections.abc import Sequence

import numpy as np


def normal(answer: str) -> str:
    """The answer without case, surrounding white space and a final full stop."""
    return " ".join(unicodedata.normalize("NFKC", answer).casefold().split()).strip(" .")


def same(one: str, other: str | None) -> bool:
    return other is not None and normal(one) == normal(other)


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a rate, 95% by default (`z`); (0, 1) for no trials (Wilson, 1927)."""
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    scale = 1 + z * z / trials
    middle = (rate + z * z / (2 * trials)) / scale
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)


def student(values: int) -> float:
    """Standard errors to either side of the mean of so many values, two or more, for a 95% interval (Student, 1908), to 1%."""
    free = values - 1
    return (12.71, 4.30)[free - 1] if free < 3 else 1.96 + 2.372 / free + 2.823 / free**2 + 2.56 / free**3


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of two or more values, and the ends of its 95% interval."""
    mean = statistics.fmean(values)
    half = student(len(values)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def ratio_interval(over: Sequence[float], under: Sequence[float]) -> tuple[float, float, float]:
    """The ratio of the means of two or more pairs of positive values, and the ends of its 95% interval (Cochran, 1977)."""
    ratio = sum(over) / sum(under)
    error = statistics.stdev([one - ratio * other for one, other in zip(over, under, strict=True)])
    half = student(len(over)) * error / math.sqrt(len(over)) / statistics.fmean(over)
    return ratio, ratio * math.exp(-half), ratio * math.exp(half)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, linear between neighbours; 0 for none."""
    return float(np.quantile(values, share)) if len(values) else 0.0
