"""Evidence, valid at any time, that a rule's share of wrong answers is at most delta.

The tests are martingales by betting. One labelled hit multiplies the wealth of a bet of the
fraction f in (0, 1] against "the share of wrong answers is delta or more" by

    1 + f w (delta - X) / (1 - delta),     X = 1 for a wrong answer, else 0

`w` is proportional to 1 / (the hit's probability of being labelled), at most 1, so that the mean of
w (delta - X) over labelled hits is a positive number times (delta - the rule's share of wrong
answers). Under the hypothesis no bet gains on average: the wealth, mixed over fractions, is a
nonnegative supermartingale that begins at 1. By Ville's inequality it ever reaches 1/alpha with
probability alpha at most (Waudby-Smith and Ramdas, Estimating means of bounded random variables by
betting, 2024). A hit without a label bets nothing, so a label that is lost for a reason that its
outcome has no part in costs time alone.

All f are fixed, so the wealth follows from four counts. Without a wrong answer f = 1 makes (1 -
delta)^-n, the most of any valid test.

Rule k's error is the mean over its bands 0..k, so if it is above delta, some band's is. Two tests
of "rule k's error is delta or more" are averaged, which is a test again: of all its labelled hits,
weighted, and the least of its bands' own. The first is quicker while nothing is open, the second
afterwards, when strict bands have few labels and the next one has many.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dejakv.identity import digest_of
from dejakv.trust import drift
from dejakv.trust.features import RISK_VERSION
from dejakv.trust.rules import FIRST, PILOT, band_of, cutoffs_of, open_rules, weights_of
from dejakv.trust.settings import TrustSettings

BETS: tuple[tuple[float, float], ...] = ((1.0, 0.5), (0.75, 0.15), (0.5, 0.25), (0.25, 0.1))
"""Fractions, and the part of the wealth on each at the beginning.

`1 - p / delta` is best for a share p of wrong answers.
"""

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
    """Return the log of the mixed wealth after some labels. Arguments broadcast.

    Parameters
    ----------
    labels, wrong : array_like
        Number of labels of full weight, and of wrong ones among them.
    delta : array_like
        Share of wrong answers that is bet against, in (0, 1).
    light_labels, light_wrong : array_like
        The same for the labels of weight `weight`.
    weight : float
        Weight of the light labels, in (0, 1].
    """
    odds = np.asarray(delta, float)[..., None] / (1 - np.asarray(delta, float)[..., None])
    total = (
        _LOG_PARTS
        + _log_product(labels, wrong, odds, 1.0)
        + _log_product(light_labels, light_wrong, odds, weight)
    )

    # Logarithms throughout: the wealth itself would overflow after some thousand labels.
    top = np.max(total, axis=-1)
    return np.asarray(top + np.log(np.sum(np.exp(total - top[..., None]), axis=-1)))


def _log_product(
    labels: ArrayLike, wrong: ArrayLike, odds: NDArray[Any], weight: float
) -> NDArray[np.float64]:
    """Return the log of the product of the betting factors, fractions along a new last axis."""
    bad = np.asarray(wrong, float)[..., None]

    good = np.asarray(labels, float)[..., None] - bad

    stake = _FRACTIONS * weight
    # A fraction of 1 loses everything with a wrong label: log 0 is meant, and 0 of them is 0.
    with np.errstate(divide="ignore", invalid="ignore"):
        lost = np.where(bad > 0, bad * np.log1p(-stake), 0.0)
    return good * np.log1p(stake * odds) + lost


def labels_needed(
    delta: float, confidence: float = 0.95, wrong_share: float = 0.0, *, weight: float = FIRST
) -> int | None:
    """Return the labels of one rule after which it opens.

    Parameters
    ----------
    delta : float
        Largest share of wrong answers.
    confidence : float
        Probability that the bound holds.
    wrong_share : float
        Share of the labels that is wrong, spread evenly.
    weight : float
        Part of alpha that the rule is tested with: the strictest rule's by default, 1 for an only
        one.

    Returns
    -------
    int or None
        None if a million labels are not enough.

    Examples
    --------
    >>> labels_needed(0.05)
    83
    """
    needed, count = -math.log((1 - confidence) * weight), 1
    while count <= 1_000_000:
        # In doubling stretches: one vectorized call each, instead of one for each count.
        labels = np.arange(count, 2 * count)
        enough = log_wealth(labels, np.floor(wrong_share * labels), delta) >= needed
        if enough.any():
            return int(labels[enough.argmax()])
        count *= 2

    return None


@dataclass(frozen=True)
class EvidenceTerms:
    """Terms under which evidence is collected.

    Attributes
    ----------
    delta : float
        Largest share of wrong answers.
    needed : float
        Log of the wealth that opens a rule: of 1 / (1 - confidence).
    explore : float
        Probability of being labelled without an open rule.
    audit : float
        Probability of being labelled with an open rule.
    """

    delta: float
    needed: float
    explore: float
    audit: float

    @classmethod
    def from_settings(cls, settings: TrustSettings) -> "EvidenceTerms":
        """Take the terms from settings with an error bound."""
        assert settings.error_bound is not None

        needed = -math.log(1 - settings.confidence)
        return cls(settings.error_bound, needed, settings.explore_share, settings.audit_share)

    @property
    def light(self) -> float:
        """Weight of a label whose hit was likelier to be labelled than others of the same rule."""
        return min(self.explore, self.audit) / max(self.explore, self.audit)

    def is_light(self, band: int, rule: int, opened: int) -> bool:
        """Return whether a hit weighs less in the evidence for a rule.

        It does only where a rule has hits of both kinds, those that an open rule covers and others.

        Parameters
        ----------
        band : int
            Band of the hit.
        rule : int
            Number of the rule.
        opened : int
            Number of open rules at the hit's draw.
        """
        return (
            0 < opened <= rule
            and (self.explore > self.audit) == (band >= opened)
            and self.explore != self.audit
        )


EVIDENCE_VERSION = 3
"""Version of the rule that turns labels into evidence."""


def fingerprint(settings: TrustSettings) -> str:
    """Return a digest of the settings that evidence depends on.

    Evidence is not used under other settings: a bound that is chosen by evidence would not hold.
    """
    terms = (
        settings.error_bound,
        settings.confidence,
        settings.explore_share,
        settings.audit_share,
        settings.differs,
    )
    return digest_of("terms", *map(repr, (EVIDENCE_VERSION, RISK_VERSION, *terms)))[:32]


@dataclass(frozen=True)
class LabelTally:
    """Labels of a rule, and wrong ones among them, by weight.

    Attributes
    ----------
    band, band_wrong : int
        Labels of the rule's own band, which no stricter rule serves.
    full, full_wrong : int
        Labels of full weight of all hits that the rule serves.
    light, light_wrong : int
        Labels of light weight of these hits.
    best : float
        Log of the most evidence that the rule has had.
    """

    band: int = 0
    band_wrong: int = 0
    full: int = 0
    full_wrong: int = 0
    light: int = 0
    light_wrong: int = 0
    best: float = 0.0


@dataclass(frozen=True)
class HitCounts:
    """Counts of a class's would-be hits since it began, through all rounds.

    Attributes
    ----------
    explored, explored_wrong : int
        Labelled while no rule covered them, and of these wrong.
    audited, wrong : int
        Served and labelled, and of these wrong.
    served : int
        Served in all.
    refused : int
        Computed in full, in all.
    lost : int
        Drawn to be labelled, and dropped before that began. Those that were served are in `wrong`
        too.
    stale : int
        Labels that came after an alarm had ended their round.
    alarms : int
        How often drift closed the gate.
    """

    explored: int = 0
    explored_wrong: int = 0
    audited: int = 0
    wrong: int = 0
    served: int = 0
    refused: int = 0
    lost: int = 0
    stale: int = 0
    alarms: int = 0

    def plus(self, other: "HitCounts") -> "HitCounts":
        """Return the sum of two counts."""
        return HitCounts(
            *(
                base + added
                for base, added in zip(vars(self).values(), vars(other).values(), strict=True)
            )
        )


def _token() -> str:
    return secrets.token_hex(4)


@dataclass(frozen=True)
class ClassEvidence:
    """The evidence of one class of hits.

    Attributes
    ----------
    round : str
        Name of this collection of evidence.
    pilot : tuple[float, ...]
        Risks of the first hits.
    cutoffs : tuple[float, ...]
        Cutoffs of the rules; empty until the pilot has enough hits.
    tallies : tuple[LabelTally, ...]
        Labels of each rule; empty as long.
    opened : int
        Number of rules up to the loosest that is open.
    drift : tuple[float, ...]
        Statistics of `drift`.
    counts : HitCounts
        Hits since the class began.

    Examples
    --------
    >>> terms = EvidenceTerms(delta=0.05, needed=3.0, explore=1.0, audit=0.02)
    >>> state = ClassEvidence().ruled((0.1, 0.2, 1.0))
    >>> for number in range(200):
    ...     risk = number % 10 / 10
    ...     state = state.learned(state.round, risk, state.opened, wrong=False, terms=terms)
    >>> state.opened
    3
    """

    round: str = field(default_factory=_token)
    pilot: tuple[float, ...] = ()
    cutoffs: tuple[float, ...] = ()
    tallies: tuple[LabelTally, ...] = ()
    opened: int = 0
    drift: tuple[float, ...] = field(default_factory=drift.begin)
    counts: HitCounts = field(default_factory=HitCounts)

    def piloted(self, risk: float) -> "ClassEvidence":
        """Return the state with one more hit of the pilot."""
        if self.cutoffs:
            return self

        pilot = (*self.pilot, risk)
        if len(pilot) < PILOT:
            return replace(self, pilot=pilot)

        return self.ruled(cutoffs_of(pilot))

    def ruled(self, cutoffs: tuple[float, ...]) -> "ClassEvidence":
        """Return the state with these rules, if it has none."""
        return (
            self
            if self.cutoffs
            else replace(self, pilot=(), cutoffs=cutoffs, tallies=(LabelTally(),) * len(cutoffs))
        )

    def counted(self, counts: HitCounts) -> "ClassEvidence":
        """Return the state with these counts added."""
        return replace(self, counts=self.counts.plus(counts))

    @property
    def warned(self) -> bool:
        """Whether drift is suspected; if so, every served hit is audited."""
        return self.opened > 0 and drift.warning(self.drift)

    def learned(
        self,
        round: str,
        risk: float,
        opened: int,
        wrong: bool,
        terms: EvidenceTerms,
        *,
        warned: bool = False,
        time: float = 0.0,
    ) -> "ClassEvidence":
        """Return the state with a label added. An alarm begins anew.

        Parameters
        ----------
        round : str
            Collection of evidence at the draw.
        risk : float
            Risk of the hit.
        opened : int
            Number of open rules at the draw.
        wrong : bool
            Whether the approximate answer was wrong.
        terms : EvidenceTerms
            Terms of the evidence.
        warned : bool
            Whether drift was suspected at the draw. Served hits that were labelled then, with
            another probability, count in their bands, and in no rule that has hits of both kinds.
        time : float
            Time of its try (see `rules.band_of`).
        """
        # Its draw was of a class state that an alarm has ended: its rules are gone.
        if round != self.round:
            return self.counted(HitCounts(stale=1))

        band = band_of(risk, self.cutoffs, time)
        served = band < opened
        counts = (
            HitCounts(audited=1, wrong=int(wrong))
            if served
            else HitCounts(explored=1, explored_wrong=int(wrong))
        )
        if served:
            statistics = drift.audited(self.drift, wrong, terms.delta)
            if drift.alarm(statistics):
                return ClassEvidence(counts=self.counts.plus(counts).plus(HitCounts(alarms=1)))
            self = replace(self, drift=statistics)
        tallies = tuple(
            _add_label(
                tally,
                rule == band,
                wrong,
                not (warned and rule >= opened),
                terms.is_light(band, rule, opened),
            )
            if rule >= band
            else tally
            for rule, tally in enumerate(self.tallies)
        )

        log_evidence = evidence(tallies, terms)
        tallies = tuple(
            replace(tally, best=max(tally.best, value))
            for tally, value in zip(tallies, log_evidence, strict=True)
        )

        # By the most evidence ever: by Ville's inequality a rule once proven stays so.
        opened = open_rules([tally.best for tally in tallies], terms.needed)
        return replace(self, tallies=tallies, opened=opened, counts=self.counts.plus(counts))

    def upper(self, terms: EvidenceTerms) -> float | None:
        """Return the upper end of the interval of the share of wrong answers now served.

        The interval is valid at any time. Its end is the least share excluded by the evidence of
        the loosest open rule. None if no rule is open.
        """
        if not self.opened:
            return None

        needed = terms.needed - math.log(weights_of(len(self.tallies))[self.opened - 1])
        return _min_excluded(
            lambda share: evidence(self.tallies[: self.opened], terms, share)[-1] >= needed
        )


def interval(labels: int, wrong: int, confidence: float) -> tuple[float, float]:
    """Return the ends of the anytime-valid intervals of a share of wrong answers.

    Parameters
    ----------
    labels : int
        Labels of one rule.
    wrong : int
        Wrong ones among them.
    confidence : float
        Confidence of each end by itself.

    Examples
    --------
    >>> [round(end, 3) for end in interval(100, 0, 0.95)]
    [0.0, 0.034]
    >>> [round(end, 2) for end in interval(100, 20, 0.95)]
    [0.07, 0.34]
    """
    needed = -math.log(1 - confidence)
    above = _min_excluded(lambda share: bool(log_wealth(labels, wrong, share) >= needed))

    # The lower end is the upper end for right answers, seen from the other side.
    below = _min_excluded(lambda share: bool(log_wealth(labels, labels - wrong, share) >= needed))
    return 1 - below, above


def _min_excluded(excluded: Callable[[float], bool]) -> float:
    """Return the least share in (0, 1) that is excluded with all above it; 1 if none is."""
    # Evidence grows with the share, so thirty halvings find its edge to nine digits.
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if middle < 1 and excluded(middle) else (middle, high)
    return high


def _add_label(
    tally: LabelTally, in_band: bool, wrong: bool, nested: bool, light: bool
) -> LabelTally:
    """Add a label to the rule's own band, and to the rule itself with full or light weight."""
    counted = ["band"] * in_band + ["light" if light else "full"] * nested

    added = {name: getattr(tally, name) + 1 for name in counted}
    return replace(
        tally,
        **added,
        **{f"{name}_wrong": getattr(tally, f"{name}_wrong") + int(wrong) for name in counted},
    )


def evidence(
    tallies: tuple[LabelTally, ...], terms: EvidenceTerms, delta: float | None = None
) -> list[float]:
    """Return the log of the evidence that each rule's error is below `delta`.

    Parameters
    ----------
    tallies : tuple[LabelTally, ...]
        Labels of each rule, the strictest first.
    terms : EvidenceTerms
        Terms of the evidence.
    delta : float, optional
        Share of wrong answers. None takes that of the terms.
    """
    against = terms.delta if delta is None else delta
    table = np.array(
        [(t.band, t.band_wrong, t.full, t.full_wrong, t.light, t.light_wrong) for t in tallies]
    )

    # The weakest of a rule's bands: if the rule is wrong too often, some band is.
    bands = np.minimum.accumulate(log_wealth(table[:, 0], table[:, 1], against))

    nested = log_wealth(
        table[:, 2],
        table[:, 3],
        against,
        light_labels=table[:, 4],
        light_wrong=table[:, 5],
        weight=terms.light,
    )
    return (np.logaddexp(bands, nested) - np.log(2)).tolist()
