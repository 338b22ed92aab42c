"""Nested rules, the strictest first.

Each rule serves hits whose risk is at most its cutoff, and all but the last serve only those whose
try is short.

The first would-be hits of a class choose the cutoffs by their risks alone and are left out of the
evidence, so whatever comes after them is independent of the choice. What is fixed in advance needs
no such hits: the cutoffs of late blends (`features.LATE_CUTOFFS`), and the length of a try. If
recent traffic decided which hits to try, cheap ones would become evidence for expensive ones.

Each rule is tested with a part of alpha, and hands its part on to the next looser one once it is
proven (the fallback procedure of Wiens, 2003). The probability that any rule opens that breaks the
bound is alpha at most, however their evidence depends on each other (Bretz et al., A graphical
approach to sequentially rejective multiple test procedures, 2009).
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache

PILOT = 20
"""Would-be hits to choose the cutoffs from, each computed in full."""

QUANTILES = (0.1, 0.2, 0.4, 0.7)
"""Quantiles of the pilot's risks, for the cutoffs.

They serve about 14, 24, 43 and 71% of later hits, and the last rule serves all.
"""

LONG_TRY = 0.4
"""Share of the exact plan's time from which on the last rule alone serves a try.

Tries take half of that on average, so they save time where a rule serves more than a fifth of them.
"""

FIRST, LAST = 0.5, 0.3
"""Parts of alpha of the strictest and the loosest rule. The others share the rest."""


def cutoffs_of(pilot: Sequence[float]) -> tuple[float, ...]:
    """Return the cutoffs that these risks choose, ascending, the last 1.

    There are fewer where many risks are equal.

    Examples
    --------
    >>> cutoffs_of([number / 20 for number in range(20)])
    (0.1, 0.2, 0.4, 0.7, 1.0)
    """
    ordered = sorted(pilot)
    chosen = {ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in QUANTILES}
    return (*sorted(cutoff for cutoff in chosen if cutoff < 1), 1.0)


def band_of(risk: float, cutoffs: Sequence[float], time: float = 0.0) -> int:
    """Return the number of the strictest rule that would serve a hit of this risk.

    Parameters
    ----------
    risk : float
        Risk of the hit, in [0, 1].
    cutoffs : Sequence[float]
        Cutoffs of the rules, ascending.
    time : float
        Time of trying it, as a share of the exact plan's.

    Examples
    --------
    >>> band_of(0.15, (0.1, 0.2, 1.0)), band_of(0.15, (0.1, 0.2, 1.0), time=0.9)
    (1, 2)
    """
    # A risk above the last cutoff cannot be: risks are at most 1, and so is that cutoff.
    last = len(cutoffs) - 1
    return last if time >= LONG_TRY else min(bisect_left(cutoffs, risk), last)


@cache
def weights_of(rules: int) -> tuple[float, ...]:
    """Return the part of alpha that each rule is tested with from the beginning; 1 in all."""
    if rules < 3:
        return (1 / rules,) * rules
    return (FIRST, *((1 - FIRST - LAST) / (rules - 2),) * (rules - 2), LAST)


def open_rules(evidence: Sequence[float], needed: float) -> int:
    """Return the number of rules up to the loosest that its evidence opens; 0 if none opens.

    Parameters
    ----------
    evidence : Sequence[float]
        Log of the most evidence that each rule has had.
    needed : float
        Log of 1 / alpha.

    Examples
    --------
    >>> open_rules([5.0, 2.0, 0.0], needed=3.0)
    1
    """
    opened, passed = 0, 0.0
    for rule, (best, weight) in enumerate(zip(evidence, weights_of(len(evidence)), strict=True)):
        # A proven rule hands its whole part on to the next looser one (fallback procedure).
        weight += passed
        proven = best >= needed - math.log(weight)
        passed = weight if proven else 0.0
        opened = rule + 1 if proven else opened
    return opened
