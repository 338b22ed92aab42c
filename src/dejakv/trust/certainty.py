"""How sure a model is of an answer's first token: what orders would-be hits best, and is known before anybody sees the token."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def orders(differs: str) -> bool:
    """Whether it orders what is wrong by this `differs`: tokens and texts. A distribution may be far away with the same sure token, and
    near without one: there the plan orders better (docs/trust.md)."""
    return not differs.startswith("kl:")


def certainty(logs: NDArray[Any]) -> dict[str, float]:
    """Of log probabilities `[vocabulary]`: `first_margin`, the best less the second, and `first_entropy`, in nats."""
    row = np.asarray(logs, np.float64)
    second, best = np.partition(row, -2)[-2:]
    there = row > -np.inf
    return {
        "first_margin": float(best - second) if np.isfinite(second) else float("inf"),
        "first_entropy": float(-np.sum(np.exp(row[there]) * row[there])),
    }
