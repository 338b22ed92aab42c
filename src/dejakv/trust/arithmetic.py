"""How many labels a bound takes."""

import math

import numpy as np

from dejakv.trust.evidence import log_wealth
from dejakv.trust.grid import FIRST


def labels_needed(
    delta: float, confidence: float = 0.95, wrong_share: float = 0.0, *, weight: float = FIRST
) -> int | None:
    """Labels of one rule after which it opens if `wrong_share` of them is wrong, spread evenly; None if a million are not enough.

    Where some are wrong, half of all streams take fewer, about. `weight`: the part of alpha that the rule is tested with; 1: it is the
    only one. Default: the strictest rule's, which is the largest of several.
    """
    needed, count = -math.log((1 - confidence) * weight), 1
    while count <= 1_000_000:
        labels = np.arange(count, 2 * count)
        enough = log_wealth(labels, np.floor(wrong_share * labels), delta) >= needed
        if enough.any():
            return int(labels[enough.argmax()])
        count *= 2
    return None
