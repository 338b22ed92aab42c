"""Detection of a rise of the share of wrong answers above the bound.

It is a Shiryaev-Roberts e-detector. For each of a few shares p above delta, audits are compared: L
is the likelihood under p over that under delta. The statistic R := (R + 1) L begins anew at every
audit at once. While the share is delta or less, the mean of R after n audits is n at most, so the
mean number of audits until R reaches c is c at least (Shin, Ramdas and Rinaldo, E-detectors, 2024).
The same holds for a mean over p.
"""

from collections.abc import Sequence

RUN_LENGTH = 10_000
"""Least mean number of audits until a false alarm, at a share of exactly delta.

Far below delta, false alarms are much rarer.
"""

WARNING = 0.01
"""Part of the way to an alarm at which every served hit is audited.

This lasts until the statistics have fallen again or the alarm comes. Two or three wrong audits in
short order go as far.
"""

RISES = (2.0, 5.0, 20.0)
"""Shares that are looked for, as multiples of delta.

None lies beyond the middle between delta and 1.
"""


def begin() -> tuple[float, ...]:
    """Return the statistics before any audit."""
    return (0.0,) * len(RISES)


def audited(statistics: Sequence[float], wrong: bool, delta: float) -> tuple[float, ...]:
    """Return the statistics after one more audit.

    Parameters
    ----------
    statistics : Sequence[float]
        Statistics before the audit.
    wrong : bool
        Whether the served answer was wrong.
    delta : float
        Error bound.
    """
    updated: list[float] = []
    for value, rise in zip(statistics, RISES, strict=True):
        # Multiples of a large bound would pass 1; the middle stays between the bound and 1.
        share = min(rise * delta, (1 + delta) / 2)

        likelihood = share / delta if wrong else (1 - share) / (1 - delta)
        updated.append((value + 1) * likelihood)
    return tuple(updated)


def alarm(statistics: Sequence[float]) -> bool:
    """Return whether the share of wrong answers has risen above delta.

    At most one in `RUN_LENGTH` audits is a false alarm on average.

    Examples
    --------
    >>> statistics = begin()
    >>> for _ in range(6):
    ...     statistics = audited(statistics, wrong=True, delta=0.05)
    >>> alarm(statistics)
    True
    """
    # The mean over the shares, written without a division.
    return sum(statistics) >= RUN_LENGTH * len(statistics)


def warning(statistics: Sequence[float]) -> bool:
    """Return whether the share may have risen, so that every served hit is audited."""
    return sum(statistics) >= WARNING * RUN_LENGTH * len(statistics)
