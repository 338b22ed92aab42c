"""Error bound and certificate as observers: they may withhold the chosen plan; the bound queues its label, a certificate labels nothing."""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv import __version__
from dejakv.config import SemanticCacheConfig
from dejakv.decide.plan import BoundTrial, Decision, Method, Observer, Plan
from dejakv.decide.queue import SettlingQueue
from dejakv.errors import ConfigError
from dejakv.request import Prepared
from dejakv.trust.certificate import Certificate
from dejakv.trust.differs import ComparedAnswer
from dejakv.trust.draw import HitDraw
from dejakv.trust.features import LATE_BLEND, TIME_SHARE, certainty, features_of, orders, risk_of
from dejakv.trust.gate import TrustGate

logger = logging.getLogger(__name__)

BOUND, CERTIFICATE = "error bound", "the certificate"
"""How the reason begins where one of them does not let an approximate plan run."""


class ErrorBound(Observer):
    """Draws for every approximate plan whether to serve it, and whether to label it in idle time.

    gate    evidence on wrong answers; draws
    queue   of would-be hits to label; None: the caller handles the draws
    """

    def __init__(self, gate: TrustGate, config: SemanticCacheConfig, queue: SettlingQueue | None = None) -> None:
        self._gate = gate
        self._config = config
        self._queue = queue

    def decided(self, prepared: Prepared, decision: Decision) -> Decision:
        """Add a trial to the decision, and remove an approximate plan that is not served.

        A request with `no_store` cannot be labelled: it runs exactly, without a draw. A blend may draw after its first token.
        """
        plan = decision.plan
        if not plan.approximate:
            return decision
        if decision.ask.no_store:
            reason = "nothing of this request is kept, so that its answer could not be checked"
            return decision.without(f"{BOUND}: {reason}")
        # Late: judged by its first token, after a trial run.
        late = decision.ask.tells_first_token and plan.method == "blend" and orders(self._config.differs)
        method, setting = LATE_BLEND if late else plan.method, setting_of(plan.method, self._config)
        cls = self._gate.class_of(prepared.request.partition, prepared.epoch, method, setting)
        features = features_of(plan, decision.found, len(prepared.token_ids))

        if late:
            tried, exact = plan.seconds, decision.exact.seconds
            features[TIME_SHARE] = tried / exact if tried is not None and exact else 0.0
        if late and self._gate.tries(cls, features):
            # `accept` fills it in during the run: the decision itself is frozen.
            trial = BoundTrial(plan)
            decision = replace(decision, trial=trial)

            def accept(logs: NDArray[np.float32]) -> str:
                trial.draw = draw = self._gate.draw(cls, {**features, **certainty(logs)})
                self._note(draw, prepared, decision)
                return "" if draw.served else f"{BOUND}: {draw.reason}"

            return replace(decision, plans=(replace(plan, accept=accept), *decision.plans[1:]))

        draw = self._gate.draw(cls, features, late=late)
        decision = replace(decision, trial=BoundTrial(plan, draw))
        if not draw.served:
            decision = decision.without(f"{BOUND}: {draw.reason}")
        self._note(draw, prepared, decision)
        return decision

    def answered(self, prepared: Prepared, decision: Decision, plan: Plan, ran: Any) -> None:
        """Hand the answer to the waiting label, for its comparison."""
        trial, queue = decision.trial, self._queue
        if trial is not None and trial.draw is not None and queue is not None and queue.differs is not None:
            sampling = prepared.request.sampling
            compared = sampling.greedy and sampling.num_beams == 1 and not queue.differs.logits  # holds no state
            answer = ComparedAnswer(ran.text, ran.token_ids) if compared else None
            queue.answered(trial.draw, answer, approximate=plan.approximate)

    def _note(self, draw: HitDraw, prepared: Prepared, decision: Decision) -> None:
        """Queue the label, before a token is seen."""
        if self._queue is not None:
            self._queue.label(draw, prepared.request, prepared.epoch, decision)


def setting_of(method: Method, config: SemanticCacheConfig) -> str:
    """Settings of a method's approximate plans: evidence on one setting says nothing about another."""
    if method == "blend":
        terms = [config.blend_map, config.blend.told, f"generation {config.max_generation}"]
        terms += [config.kv_quantization] if config.quantizes else []
    elif method == "top_layer":
        terms = [f"tail {config.top_layer_tail}", f"donors {config.blend_donors}"]
    else:
        terms = [config.index_encoder, f"score {config.similarity_threshold:g}", f"media {config.media}"]
        terms += [*config.embedding_layers, *config.levels, "words" if config.lexical_guard else "no words"]
    return ", ".join(terms)


class CertifiedObserver(Observer):
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
        certificate, plan = self._found, decision.plan
        if certificate is None or self._problem:
            return self._problem
        if prepared.epoch != certificate.epoch:
            self._warn(
                reason
                := f"{CERTIFICATE} is of another model or engine: it names {certificate.model} on {certificate.engine}"
            )
            return reason

        level, tokens = plan.match.level if plan.match is not None else "", len(prepared.token_ids)
        if (plan.method, level) != (certificate.method, certificate.level):
            return f"{CERTIFICATE} is not of such a hit: it covers {certificate.method} of {certificate.level} text"

        risk = risk_of(plan.method, features_of(plan, decision.found, tokens))
        if certificate.serves(risk, tokens):
            return ""
        if tokens > certificate.longest:
            return f"{CERTIFICATE} has no prompt as long in its log: {tokens} tokens, {certificate.longest} at most"
        return (
            f"{CERTIFICATE} does not serve such a plan: its risk is {risk:.3f}, {certificate.cutoff or 0:.3f} at most"
        )

    def _warn(self, reason: str) -> None:
        # Once for each reason: every request would log it otherwise.
        if reason != self._told:
            self._told = reason
            logger.warning("nothing approximate is served: %s", reason)


def certified_setting(config: SemanticCacheConfig) -> str:
    """Settings of blends covered by a certificate."""
    return f"{setting_of('blend', config)}, donors {config.blend_donors}, gain {config.min_gain}"


def _breaks(certificate: Certificate, config: SemanticCacheConfig) -> str:
    """Why a certificate does not cover these settings; empty if it does."""
    requested_bound, current_setting = config.error_bound, certified_setting(config)
    # A stricter certificate keeps a looser bound, but not the other way round.
    if requested_bound is not None and certificate.error_bound > requested_bound:
        return f"{CERTIFICATE} is of another bound: error_bound is {certificate.error_bound:g}, {requested_bound:g} is asked for"
    if certificate.dejakv_version != __version__:
        return f"{CERTIFICATE} is of another version of dejakv: {certificate.dejakv_version}, here {__version__}"
    if certificate.setting != current_setting:
        return f"{CERTIFICATE} is of another setting: {certificate.setting!r}, here {current_setting!r}"
    if certificate.cutoff is None:
        return f"{CERTIFICATE} opens no rule: its log has too few hits, or too many wrong ones"

    return ""
