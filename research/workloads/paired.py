"""Two arms on the same requests: the difference and the ratio of their means, with bootstrap intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES = 10_000
SEED = 0


def paired(base: Sequence[float], other: Sequence[float]) -> dict[str, Any] | None:
    """`difference` (mean of other minus base) and `ratio` (mean of other by mean of base), each with the 95% percentile
    interval over resampled requests (Efron, 1979). None for fewer than two requests, or a base that is all zero."""
    if len(base) < 2 or sum(base) == 0:
        return None
    ones, others = np.asarray(base, dtype=np.float64), np.asarray(other, dtype=np.float64)
    picks = np.random.default_rng(SEED).integers(0, len(ones), (RESAMPLES, len(ones)))
    of_base, of_other = ones[picks].mean(axis=1), others[picks].mean(axis=1)
    return {
        "difference": float((others - ones).mean()),
        "difference_interval": _interval(of_other - of_base),
        "ratio": float(others.mean() / ones.mean()),
        "ratio_interval": _interval(of_other / np.maximum(of_base, 1e-12)),
    }


def _interval(values: Any) -> list[float]:
    return [float(value) for value in np.percentile(values, [2.5, 97.5])]
