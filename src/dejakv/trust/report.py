"""Reports of a gate: its classes, their rules, and all of them together."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from dejakv.trust.draw import ClassKey
from dejakv.trust.evidence import ClassEvidence, EvidenceTerms, HitCounts, evidence
from dejakv.trust.rules import weights_of


@dataclass(frozen=True)
class RuleReport:
    """One rule of a class.

    Attributes
    ----------
    cutoff : float
        Highest risk that the rule serves if it is open.
    open : bool
        Whether the rule is open.
    labels : int
        Labelled hits under it in this round.
    wrong : int
        Wrong ones among them.
    evidence : float
        Wealth against an error above the bound, 1 at the beginning.
    needed : float
        Wealth at which the rule opens at the latest.
    """

    cutoff: float
    open: bool
    labels: int
    wrong: int
    evidence: float
    needed: float


@dataclass(frozen=True)
class ClassReport:
    """One class of hits.

    Attributes
    ----------
    cls : ClassKey
        The class.
    gate : str
        `open` if a rule is.
    rules : tuple[RuleReport, ...]
        Its rules, the strictest first.
    counts : HitCounts
        Its hits since it began.
    upper : float, optional
        Upper end of the error of what is served now. None if nothing is.
    pending : int
        Labels that are awaited in this process.
    """

    cls: ClassKey
    gate: str
    rules: tuple[RuleReport, ...]
    counts: HitCounts
    upper: float | None
    pending: int


@dataclass(frozen=True, kw_only=True)
class TrustReport(HitCounts):
    """The counts of a partition's group, or of all groups, and what their gates do now.

    Attributes
    ----------
    delta : float
        The error bound.
    confidence : float
        Probability that the bound holds.
    gate : str
        `open` if at least one class is.
    rules : int
        Number of open rules.
    upper : float, optional
        Upper end of the error of what is served now, the largest of any open class, at
        `confidence`. None if nothing is served.
    classes : tuple[ClassReport, ...]
        Reports of the classes.
    """

    delta: float
    confidence: float
    gate: str
    rules: int
    upper: float | None
    classes: tuple[ClassReport, ...] = ()


def class_report(
    cls: ClassKey, state: ClassEvidence, terms: EvidenceTerms, pending: int
) -> ClassReport:
    """Make the report of one class."""
    log_evidence = evidence(state.tallies, terms) if state.tallies else []
    # Without tallies there are no rules yet, and nothing to divide alpha among.
    weights = weights_of(len(log_evidence)) if log_evidence else ()
    rows = zip(state.cutoffs, state.tallies, log_evidence, weights, strict=True)
    rules = tuple(
        RuleReport(
            cutoff=cutoff,
            open=number < state.opened,
            labels=tally.full + tally.light,
            wrong=tally.full_wrong + tally.light_wrong,
            evidence=exp(value),
            needed=exp(terms.needed) / weight,
        )
        for number, (cutoff, tally, value, weight) in enumerate(rows)
    )

    gate = "open" if state.opened else "closed"
    return ClassReport(cls, gate, rules, state.counts, state.upper(terms), pending)


def report_of(
    terms: EvidenceTerms, confidence: float, classes: Sequence[ClassReport]
) -> TrustReport:
    """Make the report of some classes together."""
    # Every field is a count, so classes add up.
    total = HitCounts()
    for report in classes:
        total = total.plus(report.counts)

    return TrustReport(
        **vars(total),
        delta=terms.delta,
        confidence=confidence,
        gate="open" if any(report.gate == "open" for report in classes) else "closed",
        rules=sum(rule.open for report in classes for rule in report.rules),
        upper=max((report.upper for report in classes if report.upper is not None), default=None),
        classes=tuple(classes),
    )
