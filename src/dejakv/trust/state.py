"""What is known of one class: the evidence for each rule, as counts, and how many rules are open. Changes give a new state.

Rule k's error is the mean over its bands 0..k, so if it is above delta, some band's is. Two tests of "rule k's error is delta or more"
are averaged, which is one again: that of all its labelled hits, weighted, and the least of its bands' own. The first is the quicker while
nothing is open. The second is the quicker afterwards, when strict bands have few labels and the next one has many.

A rule opens when its evidence has once reached what `grid.open_rules` asks for. The loosest open rule serves.
"""

import math
import secrets
from dataclasses import dataclass, field, replace

import numpy as np

from dejakv.trust import drift
from dejakv.trust.evidence import log_wealth
from dejakv.trust.grid import PILOT, band_of, cutoffs_of, open_rules, weights_of
from dejakv.trust.terms import Terms


@dataclass(frozen=True)
class Tally:
    """Labels and how many of them are wrong: of one band, and of the rule that ends with it, by weight."""

    band: int = 0
    band_wrong: int = 0
    full: int = 0
    full_wrong: int = 0
    light: int = 0
    light_wrong: int = 0
    best: float = 0.0
    """Log of the most evidence that the rule has had."""


@dataclass(frozen=True)
class Counts:
    """What happened to would-be hits of a class since it began, through all rounds.

    explored, explored_wrong  labelled while no rule covered them
    audited, wrong            served, labelled, and of these wrong
    served                    served in all
    refused                   computed in full, in all
    lost                      drawn to be labelled, and dropped before that began; of those that were served, in `wrong` too
    stale                     labels that came after an alarm had ended their round
    alarms                    how often drift closed the gate
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

    def plus(self, other: "Counts") -> "Counts":
        """Both together."""
        return Counts(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))


def _token() -> str:
    return secrets.token_hex(4)


@dataclass(frozen=True)
class State:
    """round    a name for this collection of evidence
    pilot    risks of the first hits; `cutoffs` and `tallies` are empty until there are enough
    opened   rules up to the loosest that is open
    drift    statistics of `drift`
    """

    round: str = field(default_factory=_token)
    pilot: tuple[float, ...] = ()
    cutoffs: tuple[float, ...] = ()
    tallies: tuple[Tally, ...] = ()
    opened: int = 0
    drift: tuple[float, ...] = field(default_factory=drift.begin)
    counts: Counts = field(default_factory=Counts)

    def piloted(self, risk: float) -> "State":
        """With one more hit of the pilot."""
        if self.cutoffs:
            return self
        pilot = (*self.pilot, risk)
        if len(pilot) < PILOT:
            return replace(self, pilot=pilot)
        cutoffs = cutoffs_of(pilot)
        return replace(self, pilot=(), cutoffs=cutoffs, tallies=(Tally(),) * len(cutoffs))

    def counted(self, counts: Counts) -> "State":
        return replace(self, counts=self.counts.plus(counts))

    @property
    def warned(self) -> bool:
        """Whether every served hit is audited, since drift is suspected."""
        return self.opened > 0 and drift.warning(self.drift)

    def learned(
        self,
        round: str,
        risk: float,
        opened: int,
        wrong: bool,
        terms: Terms,
        *,
        warned: bool = False,
        time: float = 0.0,
    ) -> "State":
        """With one more label. An alarm begins anew.

        time            see `grid.band_of`
        opened, warned  as they were when it was drawn. While drift is suspected, served hits are labelled with another probability;
                        labels of that time count in no rule that has hits of both kinds, but do in their bands
        """
        if round != self.round:
            return self.counted(Counts(stale=1))
        if not self.cutoffs:  # a hit whose risk was not known when it was drawn
            return self.piloted(risk).counted(Counts(explored=1, explored_wrong=int(wrong)))
        band = band_of(risk, self.cutoffs, time)
        served = band < opened
        counts = Counts(audited=1, wrong=int(wrong)) if served else Counts(explored=1, explored_wrong=int(wrong))
        if served:
            statistics = drift.audited(self.drift, wrong, terms.delta)
            if drift.alarm(statistics):
                return State(counts=self.counts.plus(counts).plus(Counts(alarms=1)))
            self = replace(self, drift=statistics)
        tallies = tuple(
            _with(tally, rule == band, wrong, not (warned and rule >= opened), terms.is_light(band, rule, opened))
            if rule >= band
            else tally
            for rule, tally in enumerate(self.tallies)
        )
        found = evidence(tallies, terms)
        tallies = tuple(
            replace(tally, best=max(tally.best, value)) for tally, value in zip(tallies, found, strict=True)
        )
        opened = open_rules([tally.best for tally in tallies], terms.needed)
        return replace(self, tallies=tallies, opened=opened, counts=self.counts.plus(counts))

    def upper(self, terms: Terms) -> float | None:
        """Upper end of the anytime-valid interval of the error of what is served now; None while nothing is. It holds for all rules
        at once, each with its part of alpha."""
        if not self.opened:
            return None
        needed = terms.needed - math.log(weights_of(len(self.tallies))[self.opened - 1])
        return upper_of(self.tallies[: self.opened], terms, needed)


def _with(tally: Tally, own: bool, wrong: bool, nested: bool, light: bool) -> Tally:
    """With one more label: of the rule's own band, and of the rule itself, of full or light weight."""
    one = int(wrong)
    if own:
        tally = replace(tally, band=tally.band + 1, band_wrong=tally.band_wrong + one)
    if nested and light:
        return replace(tally, light=tally.light + 1, light_wrong=tally.light_wrong + one)
    if nested:
        return replace(tally, full=tally.full + 1, full_wrong=tally.full_wrong + one)
    return tally


def evidence(tallies: tuple[Tally, ...], terms: Terms, delta: float | None = None) -> list[float]:
    """The log of the evidence that each rule's error is below `delta`, the terms' own if it is not given."""
    against = terms.delta if delta is None else delta
    table = np.array([(t.band, t.band_wrong, t.full, t.full_wrong, t.light, t.light_wrong) for t in tallies])
    bands = np.minimum.accumulate(log_wealth(table[:, 0], table[:, 1], against))
    nested = log_wealth(
        table[:, 2], table[:, 3], against, light_labels=table[:, 4], light_wrong=table[:, 5], weight=terms.light
    )
    return (np.logaddexp(bands, nested) - np.log(2)).tolist()


def upper_of(tallies: tuple[Tally, ...], terms: Terms, needed: float) -> float:
    """The least share that the evidence of the last rule excludes; 1 if it excludes none. Evidence grows with the share."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if middle < 1 and evidence(tallies, terms, middle)[-1] >= needed:
            high = middle
        else:
            low = middle
    return high
