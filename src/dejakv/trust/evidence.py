r"""Evidence that a rule's share of wrong answers is at most delta, valid at any time: test martingales by betting.

One labelled hit multiplies the wealth of a bet of the fraction f in (0, 1] against "the share of wrong answers is delta or more" by

    1 + f w (delta - X) / (1 - delta),     X = 1 for a wrong answer, else 0

`w` is proportional to 1 / (the hit's probability of being labelled), at most 1. Among labelled hits a risk comes in proportion to how
often it occurs times that probability, so the mean of w (delta - X) over labelled hits is a positive number times (delta - the rule's
share of wrong answers). Under the hypothesis no bet gains on average: the wealth is a nonnegative supermartingale that begins at 1,
and so is a mixture over fractions. By Ville's inequality it ever reaches 1/alpha with probability alpha at most, whenever somebody
looks and whatever they do then (Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, 2024).

Hits that are not labelled bet nothing. So a label that is lost for a reason that its outcome has no part in costs time alone.

All f are fixed, so that the wealth follows from four counts. The largest, 1, is certain: without a wrong answer its wealth is
(1 - delta)^-n, the most that any valid test can have.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

BETS: tuple[tuple[float, float], ...] = ((1.0, 0.5), (0.75, 0.15), (0.5, 0.25), (0.25, 0.1))
"""Fractions, and the part of the wealth that begins on each. `1 - p / delta` is the best one for a share p of wrong answers."""

_FRACTIONS = np.array([fraction for fraction, _ in BETS])
_LOG_PARTS = np.log([part for _, part in BETS])


def log_wealth(
    labels: ArrayLike,
    wrong: ArrayLike,
    delta: ArrayLike,
    *,
    light_labels: ArrayLike = 0,
    light_wrong: ArrayLike = 0,
    weight: float = 1.0,
) -> NDArray[np.float64]:
    """The log of the mixed wealth after some labels; arguments broadcast.

    labels, wrong              how many labels of full weight there are, and how many of them are wrong
    light_labels, light_wrong  the same of the labels of weight `weight`, in (0, 1]
    delta                      the share of wrong answers that is bet against, in (0, 1)
    """
    odds = np.asarray(delta, float)[..., None] / (1 - np.asarray(delta, float)[..., None])
    total = _LOG_PARTS + _log_product(labels, wrong, odds, 1.0) + _log_product(light_labels, light_wrong, odds, weight)
    top = np.max(total, axis=-1)
    return np.asarray(top + np.log(np.sum(np.exp(total - top[..., None]), axis=-1)))


def _log_product(labels: ArrayLike, wrong: ArrayLike, odds: NDArray[Any], weight: float) -> NDArray[np.float64]:
    """The log of the factors' product for each fraction, along a last axis."""
    bad = np.asarray(wrong, float)[..., None]
    good = np.asarray(labels, float)[..., None] - bad
    stake = _FRACTIONS * weight
    with np.errstate(divide="ignore", invalid="ignore"):
        lost = np.where(bad > 0, bad * np.log1p(-stake), 0.0)
    return good * np.log1p(stake * odds) + lost
