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

    cutoff    highest risk that the rule serves, if it is `open`
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
    """One class. `upper`: see `TrustReport`; `pending`: labels awaited in this process."""

    cls: ClassKey
    gate: str
    rules: tuple[RuleReport, ...]
    counts: HitCounts
    upper: float | None
    pending: int


@dataclass(frozen=True, kw_only=True)
class TrustReport(HitCounts):
    """The counts of a partition's group, or of all groups, and what their gates do now.

    gate   `open` if at least one class is
    rules  rules that are open
    upper  upper end of the error of what is served now, the largest of any open class, at `confidence`; None: nothing is
    """

    delta: float
    confidence: float
    gate: str
    rules: int
    upper: float | None
    classes: tuple[ClassReport, ...] = ()


def class_report(cls: ClassKey, state: ClassEvidence, terms: EvidenceTerms, pending: int) -> ClassReport:
    """The report of one class."""
    log_evidence = evidence(state.tallies, terms) if state.tallies else []
    # Without tallies there are no rules yet, and nothing to divide alpha among.
    weights = weights_of(len(log_evidence)) if log_evidence else ()
    rules = tuple(
        RuleReport(
            cutoff, number < state.opened, tally.full + tally.light, tally.full_wrong + tally.light_wrong, exp(value),
            exp(terms.needed) / weight,
        )
        for number, (cutoff, tally, value, weight) in enumerate(
            zip(state.cutoffs, state.tallies, log_evidence, weights, strict=True)
        )
    )  # fmt: skip

    gate = "open" if state.opened else "closed"
    return ClassReport(cls, gate, rules, state.counts, state.upper(terms), pending)


def report_of(terms: EvidenceTerms, confidence: float, classes: Sequence[ClassReport]) -> TrustReport:
    """The report of some classes together."""
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
