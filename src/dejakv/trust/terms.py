"""What evidence is judged by: the numbers of a `TrustSettings` that a class's evidence was collected under."""

from dataclasses import dataclass

from dejakv.identity import digest_of
from dejakv.trust.features import RISK_VERSION
from dejakv.trust.settings import TrustSettings


@dataclass(frozen=True)
class Terms:
    """delta and the log of the wealth that is needed, and the probabilities of being labelled without and with an open rule."""

    delta: float
    needed: float
    explore: float
    audit: float

    @classmethod
    def of(cls, settings: TrustSettings) -> "Terms":
        """Of settings that have a bound."""
        assert settings.error_bound is not None
        return cls(settings.error_bound, settings.needed, settings.explore_share, settings.audit_share)

    @property
    def light(self) -> float:
        """Weight of a label whose hit was likelier to be labelled than others of the same rule."""
        return min(self.explore, self.audit) / max(self.explore, self.audit)

    def is_light(self, band: int, rule: int, opened: int) -> bool:
        """Whether a hit of this band weighs less in the evidence for a rule, drawn while the first `opened` rules were open.

        Only where a rule has hits of both kinds: those that an open rule covers, and others.
        """
        return 0 < opened <= rule and (self.explore > self.audit) == (band >= opened) and self.explore != self.audit


EVIDENCE_VERSION = 2
"""Raised with every change of how evidence is made of labels."""


def fingerprint(settings: TrustSettings) -> str:
    """What evidence was collected under. Evidence of other terms is not used: a bound that is chosen by what the evidence says
    would not hold."""
    terms = (settings.error_bound, settings.confidence, settings.explore_share, settings.audit_share, settings.differs)
    return digest_of("terms", *map(repr, (EVIDENCE_VERSION, RISK_VERSION, *terms)))[:32]
