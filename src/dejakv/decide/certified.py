"""A certificate as an observer: it withholds approximate plans outside of the rules that a log has opened, and labels nothing."""

import logging

from dejakv import __version__
from dejakv.config import SemanticCacheConfig
from dejakv.decide import bound
from dejakv.decide.plan import Decision, Observer
from dejakv.errors import ConfigError
from dejakv.request import Prepared
from dejakv.trust.certificate import Certificate
from dejakv.trust.features import features_of, risk_of

logger = logging.getLogger(__name__)

CERTIFICATE = "the certificate"
"""How the reason begins where a certificate does not let an approximate plan run."""


class Certified(Observer):
    """Keeps to the certificate of a config. One that cannot be used, or is of another bound or setting, withholds every approximate
    plan, and so does one of another epoch: the log says it once, and each request has the reason."""

    def __init__(self, config: SemanticCacheConfig) -> None:
        assert config.certificate is not None
        self._found: Certificate | None = None
        self._told = ""
        try:
            self._found = Certificate.read(config.certificate)
            self._problem = _breaks(self._found, config)
        except ConfigError as error:
            self._problem = str(error)
        if self._problem:
            self._warn(self._problem)

    def decided(self, prepared: Prepared, decision: Decision) -> Decision:
        """Withhold the chosen plan if it is approximate and no rule serves it."""
        if not decision.plan.approximate:
            return decision
        refused = self._refused(prepared, decision)
        return decision.without(refused) if refused else decision

    def _refused(self, prepared: Prepared, decision: Decision) -> str:
        found, plan = self._found, decision.plan
        if found is None or self._problem:
            return self._problem
        if prepared.epoch != found.epoch:
            self._warn(why := f"{CERTIFICATE} is of another model or engine: it names {found.model} on {found.engine}")
            return why
        level, tokens = plan.match.level if plan.match is not None else "", len(prepared.token_ids)
        if (plan.method, level) != (found.method, found.level):
            return f"{CERTIFICATE} is not of such a hit: it covers {found.method} of {found.level} text"
        risk = risk_of(plan.method, features_of(plan, decision.found, tokens))
        if found.serves(risk, tokens):
            return ""
        if tokens > found.longest:
            return f"{CERTIFICATE} has no prompt as long in its log: {tokens} tokens, {found.longest} at most"
        return f"{CERTIFICATE} does not serve such a plan: its risk is {risk:.3f}, {found.cutoff or 0:.3f} at most"

    def _warn(self, why: str) -> None:
        if why != self._told:
            self._told = why
            logger.warning("nothing approximate is served: %s", why)


def setting_of(config: SemanticCacheConfig) -> str:
    """Settings of blends that a certificate is of."""
    return f"{bound.setting_of('blend', config)}, donors {config.blend_donors}, gain {config.min_gain}"


def _breaks(found: Certificate, config: SemanticCacheConfig) -> str:
    """Why a certificate says nothing about these settings; empty if it does."""
    asked, here = config.error_bound, setting_of(config)
    if asked is not None and found.error_bound > asked:
        return f"{CERTIFICATE} is of another bound: error_bound is {found.error_bound:g}, {asked:g} is asked for"
    if found.dejakv_version != __version__:
        return f"{CERTIFICATE} is of another version of dejakv: {found.dejakv_version}, here {__version__}"
    if found.setting != here:
        return f"{CERTIFICATE} is of another setting: {found.setting!r}, here {here!r}"
    if found.cutoff is None:
        return f"{CERTIFICATE} opens no rule: its log has too few hits, or too many wrong ones"
    return ""
