"""Certificates: which blends were right often enough in a log of requests, as one JSON file.

Every hit of the log is computed both ways, and the risks of the first ones choose nested rules
(`trust.rules`). A rule opens if the evidence of all later hits together (`trust.evidence`) is that
its share of wrong answers is at most the bound. The evidence depends on no order and holds at any
length of the log, so a log that opens nothing may be continued and certified again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import InstanceOf

from dejakv.errors import ConfigError
from dejakv.identity import digest_of
from dejakv.settings import Count, Share, from_mapping, strict_dataclass
from dejakv.trust.evidence import ClassEvidence, EvidenceTerms, LabelTally, evidence, interval
from dejakv.trust.features import RISK_VERSION
from dejakv.trust.rules import PILOT, band_of, cutoffs_of, open_rules
from dejakv.trust.settings import Confidence, ErrorBound, TrustSettings

HOLDS = "holds for traffic like its log, and says nothing of other traffic"

NO_BOUND = "a certificate is of a bound: give --error-bound, such as .05"

FORMAT = 1
"""Version of the file, counted up with every change of what a rule means."""

Values = InstanceOf[Mapping[str, Any]]
Verdict = Literal["holds", "does not hold", "too few hits"]


@dataclass(frozen=True)
class CertifiedHit:
    """A hit of the log.

    Attributes
    ----------
    risk : float
        What orders hits, in [0, 1].
    wrong : bool
        Whether its approximate answer was wrong.
    tokens : int
        Tokens of its prompt.
    features : Mapping[str, float]
        Its features (`features.features_of`).
    """

    risk: float
    wrong: bool
    tokens: int
    features: Mapping[str, float]


@strict_dataclass(kw_only=True)
class Certificate:
    """What a log showed."""

    holds: str = HOLDS
    error_bound: ErrorBound
    """see `TrustSettings`"""
    confidence: Confidence
    """see `TrustSettings`"""
    differs: str
    """see `TrustSettings`"""
    cutoff: Share | None
    """highest risk that the open rules serve; None: none opened"""
    longest: Count
    """tokens of the log's longest hit; longer prompts are not served"""
    upper: Share | None
    """upper end of the share of wrong answers among what they serve, at `confidence`"""
    model: str
    engine: str
    epoch: str
    """of the engine that ran the log; `model` and `engine` name it"""
    level: str
    """where the log's donors were found, and `method` and `setting` of their use
    (`decide.bound.certified_setting`)"""
    method: str
    setting: str
    made: str
    """day, in ISO 8601"""
    dejakv_version: str
    counts: Values
    """`requests` of the log, `not_run`, `hits` that were blended, `wrong` ones, those `kept`, which
    the open rules serve, and `kept_wrong` among them"""
    rules: tuple[Values, ...]
    """each with its `cutoff`, and `hits` and `wrong` ones behind the pilot, `log_evidence`, and
    whether it is `open`"""
    settings: Values
    """of the run, by name, for an audit"""
    evidence: tuple[Values, ...]
    """the hits, in order"""
    risk_version: Count = RISK_VERSION
    format: Count = FORMAT

    def text(self) -> str:
        """Return the file, with a checksum over all else in it."""
        return json.dumps({**vars(self), "checksum": _checksum(vars(self))}, indent=1) + "\n"

    @classmethod
    def read(cls, path: str | Path) -> "Certificate":
        """Read a certificate.

        Raises
        ------
        ConfigError
            For a file that cannot be read, is no certificate, is of another version, or was edited.
        """
        again = "make it again with `dejakv certify`"
        try:
            values: Any = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"the certificate cannot be read: {type(error).__name__}; {again}"
            ) from error

        values = cast(dict[str, Any], values) if isinstance(values, dict) else {}
        if not {"checksum", "format", "risk_version"} <= set(values):
            raise ConfigError(f"the certificate is no file of `dejakv certify`: {again}")
        # `pop` first: the checksum is over everything else.
        if values.pop("checksum") != _checksum(values):
            raise ConfigError(
                f"the certificate was edited or damaged: its checksum is another; {again}"
            )
        if (values["format"], values["risk_version"]) != (FORMAT, RISK_VERSION):
            raise ConfigError(f"the certificate is of another version of dejakv: {again}")
        return from_mapping(cls, values, "the certificate")

    @property
    def hits(self) -> list[CertifiedHit]:
        """Hits of the log, in order."""
        return [CertifiedHit(**hit) for hit in self.evidence]

    def recertify(self, settings: TrustSettings) -> "Certificate":
        """Certify the same evidence for another bound or confidence.

        Each certificate has its confidence by itself, so the bound must be chosen before the
        evidence is looked at.

        Raises
        ------
        ConfigError
            Without a bound.
        """
        if settings.error_bound is None:
            raise ConfigError(NO_BOUND)

        rule_fields = rules_of(self.hits, settings)

        counts = {**self.counts, **rule_fields.pop("counts")}
        bound_fields = {"error_bound": settings.error_bound, "confidence": settings.confidence}
        return replace(self, **bound_fields, **rule_fields, counts=counts)

    def serves(self, risk: float, tokens: int) -> bool:
        """Return whether an open rule serves a hit of this risk, for a prompt of so many tokens."""
        return self.cutoff is not None and risk <= self.cutoff and tokens <= self.longest

    def audit(self, hits: Sequence[CertifiedHit]) -> "CertificateAudit":
        """Compare the hits of a later log, of any number, with this certificate."""
        served = [hit for hit in hits if self.serves(hit.risk, hit.tokens)]

        low, high = interval(len(served), _wrong(served), self.confidence)
        verdict: Verdict = "too few hits"
        # Both ends hold at the same time: the bound may lie between them, and nothing is said.
        if low > self.error_bound:
            verdict = "does not hold"
        elif high <= self.error_bound:
            verdict = "holds"
        return CertificateAudit(verdict, len(hits), len(served), _wrong(served), low, high)


@dataclass(frozen=True)
class CertificateAudit:
    """What a later log says of a certificate.

    Attributes
    ----------
    verdict : Verdict
        Whether the bound held for the log: `too few hits` where it lies between `low` and `high`.
    hits : int
        Hits of the log.
    served : int
        Hits that the open rules serve.
    wrong : int
        Wrong ones among the served hits.
    low, high : float
        Ends of the intervals of their share, each at the certificate's confidence.
    """

    verdict: Verdict
    hits: int
    served: int
    wrong: int
    low: float
    high: float


def rules_of(hits: Sequence[CertifiedHit], settings: TrustSettings) -> dict[str, Any]:
    """Return the fields of the certificate that follow from the hits.

    They are `rules`, `cutoff`, `longest`, `upper`, `counts` and `evidence`.
    """
    # Every hit has its label.
    terms = replace(EvidenceTerms.from_settings(settings), explore=1.0, audit=1.0)
    state, rules = ClassEvidence(), list[dict[str, Any]]()
    # The pilot chooses the rules, so it cannot be evidence for them.
    if len(hits) > PILOT:
        cutoffs = cutoffs_of([hit.risk for hit in hits[:PILOT]])
        tallies = tuple(_tally(hits[PILOT:], cutoffs, rule) for rule in range(len(cutoffs)))
        log_evidence = evidence(tallies, terms)
        state = replace(
            state, cutoffs=cutoffs, tallies=tallies, opened=open_rules(log_evidence, terms.needed)
        )
        rows = zip(cutoffs, tallies, log_evidence, strict=True)
        rules = [
            {
                "cutoff": cutoff,
                "open": rule < state.opened,
                "hits": tally.full,
                "wrong": tally.full_wrong,
                "log_evidence": value,
            }
            for rule, (cutoff, tally, value) in enumerate(rows)
        ]

    # Rules are nested, so the loosest open one covers all others.
    cutoff = state.cutoffs[state.opened - 1] if state.opened else None
    served = [hit for hit in hits if cutoff is not None and hit.risk <= cutoff]
    return {
        "rules": tuple(rules),
        "cutoff": cutoff,
        "longest": max((hit.tokens for hit in hits), default=0),
        "upper": state.upper(terms),
        "counts": {
            "hits": len(hits),
            "wrong": _wrong(hits),
            "kept": len(served),
            "kept_wrong": _wrong(served),
        },
        "evidence": tuple(dict(vars(hit)) for hit in hits),
    }


def _tally(hits: Sequence[CertifiedHit], cutoffs: Sequence[float], rule: int) -> LabelTally:
    """Count the labels of one rule, and of its own band."""
    bands = [(band_of(hit.risk, cutoffs), hit) for hit in hits]
    band_hits = [hit for band, hit in bands if band == rule]
    nested = [hit for band, hit in bands if band <= rule]
    return LabelTally(len(band_hits), _wrong(band_hits), len(nested), _wrong(nested))


def _wrong(hits: Sequence[CertifiedHit]) -> int:
    return sum(hit.wrong for hit in hits)


def _checksum(values: Mapping[str, Any]) -> str:
    return digest_of("certificate", json.dumps(values, sort_keys=True))
