"""Notices that the share of wrong answers among served hits has risen above the bound: a Shiryaev-Roberts e-detector.

For each of a few shares p above delta, audits are compared: the likelihood under p over that under delta is L. The statistic
R := (R + 1) L begins anew at every audit at once. While the share is delta or less, the mean of R after n audits is n at most, so the
mean number of audits until R reaches c is c at least (Shin, Ramdas and Rinaldo, E-detectors, 2024). The same holds for a mean over p.
"""

from collections.abc import Sequence

RUN_LENGTH = 10_000
"""Audits until a false alarm, on average, at least: at a share of exactly delta. Far below it they are much rarer."""

WARNING = 0.01
"""Part of the way to an alarm at which every served hit is audited, until the statistics have fallen again or the alarm comes. Two or
three wrong audits in short order go as far."""

RISES = (2.0, 5.0, 20.0)
"""The shares that are looked for, as multiples of delta; none lies beyond the middle between delta and 1."""


def begin() -> tuple[float, ...]:
    """The statistics before any audit."""
    return (0.0,) * len(RISES)


def audited(statistics: Sequence[float], wrong: bool, delta: float) -> tuple[float, ...]:
    """The statistics after one more audit."""
    updated: list[float] = []
    for value, rise in zip(statistics, RISES, strict=True):
        # Multiples of a large bound would pass 1; the middle stays between the bound and 1.
        share = min(rise * delta, (1 + delta) / 2)
        likelihood = share / delta if wrong else (1 - share) / (1 - delta)
        updated.append((value + 1) * likelihood)
    return tuple(updated)


def alarm(statistics: Sequence[float]) -> bool:
    """Whether the share of wrong answers has risen above delta. False alarms: one in `RUN_LENGTH` audits on average, at most.

    >>> statistics = begin()
    >>> for _ in range(6):
    ...     statistics = audited(statistics, wrong=True, delta=0.05)
    >>> alarm(statistics)
    True
    """
    return sum(statistics) >= RUN_LENGTH * len(statistics)


def warning(statistics: Sequence[float]) -> bool:
    """Whether the share may have risen: every served hit is audited then."""
    return sum(statistics) >= WARNING * RUN_LENGTH * len(statistics)
