"""Reports of a gate: its classes, their rules, and all of them together."""

from dataclasses import dataclass
from math import exp

from dejakv.trust.draw import ClassKey
from dejakv.trust.evidence import Counts, State, Terms, evidence
from dejakv.trust.rules import weights_of
from dejakv.trust.settings import TrustSettings


@dataclass(frozen=True)
class RuleReport:
    """One rule.

    cutoff    it serves hits of at most this risk
    open      whether it serves
    labels    labelled hits under it in this round, `wrong` of them
    evidence  wealth against an error above the bound: 1 at the beginning; it opens at `needed` at the latest
    """

    cutoff: float
    open: bool
    labels: int
    wrong: int
    evidence: float
    needed: float


@dataclass(frozen=True)
class ClassReport:
    """One class. `upper`: see `TrustReport`; `pending`: labels that this process waits for."""

    cls: ClassKey
    gate: str
    rules: tuple[RuleReport, ...]
    counts: Counts
    upper: float | None
    pending: int


@dataclass(frozen=True)
class TrustReport:
    """The classes of a partition's group, or of all groups, together.

    gate                `open` if at least one class is
    explored            would-be hits that were computed both ways while no rule covered them; `explored_wrong` of them
    served, audited     hits that were served, and those of them that were computed in full as well; `wrong` of these
    lost                drawn to be labelled, and dropped before that began; those that were served are `wrong` too
    upper               upper end of the error of what is served now, the largest of any open class, at `confidence`; None: nothing is
    alarms              how often drift closed a class
    """

    delta: float
    confidence: float
    gate: str
    rules: int
    explored: int
    explored_wrong: int
    served: int
    audited: int
    wrong: int
    lost: int
    upper: float | None
    alarms: int
    classes: tuple[ClassReport, ...] = ()


def class_report(cls: ClassKey, state: State, terms: Terms, pending: int) -> ClassReport:
    """The report of one class."""
    found = evidence(state.tallies, terms) if state.tallies else []
    weights = weights_of(len(found)) if found else ()
    rules = tuple(
        RuleReport(
            cutoff, number < state.opened, tally.full + tally.light, tally.full_wrong + tally.light_wrong, exp(value),
            exp(terms.needed) / weight,
        )
        for number, (cutoff, tally, value, weight) in enumerate(
            zip(state.cutoffs, state.tallies, found, weights, strict=True)
        )
    )  # fmt: skip
    gate = "open" if state.opened else "closed"
    return ClassReport(cls, gate, rules, state.counts, state.upper(terms), pending)


def whole_report(settings: TrustSettings, classes: tuple[ClassReport, ...]) -> TrustReport:
    """The report of some classes together."""
    total = Counts()
    for one in classes:
        total = total.plus(one.counts)
    assert settings.error_bound is not None
    return TrustReport(
        delta=settings.error_bound,
        confidence=settings.confidence,
        gate="open" if any(one.gate == "open" for one in classes) else "closed",
        rules=sum(rule.open for one in classes for rule in one.rules),
        explored=total.explored,
        explored_wrong=total.explored_wrong,
        served=total.served,
        audited=total.audited,
        wrong=total.wrong,
        lost=total.lost,
        upper=max((one.upper for one in classes if one.upper is not None), default=None),
        alarms=total.alarms,
        classes=classes,
    )
