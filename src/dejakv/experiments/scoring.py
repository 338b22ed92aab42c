"""Correctness of an answer, and the interval of a rate."""

import math
import unicodedata
from collections.abc import Sequence


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


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, linear between neighbours; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
