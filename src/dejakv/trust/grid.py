"""Which rules are tried: nested, the strictest first. A rule serves hits whose risk is at most its cutoff.

The first would-be hits of a class choose the cutoffs by their risks alone, and are then left out of the evidence. Whatever comes after
them is independent of the choice, so that it counts as fixed. Without it a rule that no hit falls under would keep the others closed.
"""

from bisect import bisect_left
from collections.abc import Sequence

PILOT = 20
"""Would-be hits that choose the cutoffs. They are computed in full, and once."""

QUANTILES = (0.2, 0.4, 0.6, 0.8)
"""Shares of hits that the rules serve, about; the last rule serves all."""


def cutoffs_of(pilot: Sequence[float]) -> tuple[float, ...]:
    """The cutoffs that these risks choose, ascending, the last 1. Fewer where many risks are equal."""
    ordered = sorted(pilot)
    chosen = {ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in QUANTILES}
    return (*sorted(cutoff for cutoff in chosen if cutoff < 1), 1.0)


def band_of(risk: float, cutoffs: Sequence[float]) -> int:
    """The strictest rule that would serve a hit of this risk."""
    return min(bisect_left(cutoffs, risk), len(cutoffs) - 1)
