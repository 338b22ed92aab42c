"""Error bound and certificate as observers of requests.

Both may withhold the chosen plan. The bound also queues a label for it, and a certificate labels
nothing.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv import __version__
from dejakv.config import SemanticCacheConfig
from dejakv.decide.method import method_named
from dejakv.decide.plan import BoundTrial, Decision, PiecewisePlan, Plan, RequestObserver
from dejakv.decide.queue import SettlingQueue
from dejakv.errors import ConfigError
from dejakv.request import Prepared
from dejakv.trust.certificate import Certificate
from dejakv.trust.differs import ComparedAnswer
from dejakv.trust.draw import ClassKey, HitDraw
from dejakv.trust.features import LATE_BLEND, TIME_SHARE, certainty, features_of, orders, risk_of
from dejakv.trust.gate import TrustGate

logger = logging.getLogger(__name__)

BOUND, CERTIFICATE = "error bound", "the certificate"
"""Beginnings of the reason where one of them does not let an approximate plan run."""


class ErrorBound(RequestObserver):
    """Observer that draws for each approximate plan whether it is served, and whether labelled.

    Parameters
    ----------
    gate : TrustGate
        Evidence on wrong answers, and the draws.
    config : SemanticCacheConfig
        Settings of the cache.
    queue : SettlingQueue, optional
        Queue of would-be hits to label in idle time. With None the caller handles the draws.
    """

    def __init__(
        self, gate: TrustGate, config: SemanticCacheConfig, queue: SettlingQueue | None = None
    ) -> None:
        self._gate = gate
        self._config = config
        self._queue = queue

    def review_decision(self, prepared: Prepared, decision: Decision) -> Decision:
        """Add a trial to the decision, and remove an approximate plan that is not served.

        The label that a draw asks for is queued. A request with `no_store` cannot be labelled: it
        runs exactly, without a draw. A blend may draw after its first token.
        """
        plan = decision.plan
        if not plan.approximate:
            return decision
        if decision.ask.no_store:
            reason = "nothing of this request is kept, so that its answer could not be checked"
            return decision.without(f"{BOUND}: {reason}")

        # Late: judged by its first token, after a trial run.
        late = (
            decision.ask.tells_first_token
            and isinstance(plan, PiecewisePlan)
            and plan.method == "blend"
            and orders(self._config.differs)
        )

        method, setting = LATE_BLEND if late else plan.method, setting_of(plan.method, self._config)
        cls = self._gate.class_of(prepared.request.partition, prepared.epoch, method, setting)

        features = features_of(plan, decision.donor_search, len(prepared.token_ids))

        if late:
            tried, exact = plan.seconds, decision.exact.seconds
            features[TIME_SHARE] = tried / exact if tried is not None and exact else 0.0
        if late and self._gate.tries(cls, features):
            trial = FirstTokenTrial(plan, self._gate, cls, features)
            decision = replace(decision, trial=trial)
            accept = partial(self._accept, trial, prepared, decision)
            return replace(decision, plans=(replace(plan, accept=accept), *decision.plans[1:]))

        draw = self._gate.draw(cls, features, late=late)
        decision = replace(decision, trial=BoundTrial(plan, draw))
        if not draw.served:
            decision = decision.without(f"{BOUND}: {draw.reason}")
        self._queue_label(draw, prepared, decision)
        return decision

    def observe_answer(self, prepared: Prepared, decision: Decision, plan: Plan, ran: Any) -> None:
        """Hand the answer to the waiting label, for its comparison."""
        trial, queue = decision.trial, self._queue
        if (
            trial is not None
            and trial.draw is not None
            and queue is not None
            and queue.differs is not None
        ):
            sampling = prepared.request.sampling
            # Greedy answers are compared, and text alone has no logits: others run once more.
            compared = sampling.greedy and sampling.num_beams == 1 and not queue.differs.logits

            answer = ComparedAnswer(ran.text, ran.token_ids) if compared else None
            queue.add_answer(trial.draw, answer, approximate=plan.approximate)

    def _accept(
        self,
        trial: "FirstTokenTrial",
        prepared: Prepared,
        decision: Decision,
        logs: NDArray[np.float32],
    ) -> str:
        """Return why the blend of a late trial is not served; empty if it is."""
        draw = trial.judge(logs)
        self._queue_label(draw, prepared, decision)
        return "" if draw.served else f"{BOUND}: {draw.reason}"

    def _queue_label(self, draw: HitDraw, prepared: Prepared, decision: Decision) -> None:
        """Queue the label before a token is seen."""
        if self._queue is not None:
            self._queue.label(draw, prepared.request, prepared.epoch, decision)


class FirstTokenTrial(BoundTrial):
    """Trial of a blend that is drawn during the run, once its first token is known.

    The decision names the trial and stays as it is: the draw is the trial's own result.

    Parameters
    ----------
    plan : Plan
        The blend on trial.
    gate : TrustGate
        Evidence on wrong answers, and the draws.
    cls : ClassKey
        Class of hits that the blend is one of.
    features : Mapping[str, float]
        Features known before the run.
    """

    def __init__(
        self, plan: Plan, gate: TrustGate, cls: ClassKey, features: Mapping[str, float]
    ) -> None:
        super().__init__(plan)
        self._gate, self._cls, self._features = gate, cls, features

    def judge(self, logs: NDArray[np.float32]) -> HitDraw:
        """Draw for the blend by the log probabilities of its first token, `[vocabulary]`."""
        self._draw = self._gate.draw(self._cls, {**self._features, **certainty(logs)})
        return self._draw


def setting_of(method: str, config: SemanticCacheConfig) -> str:
    """Return the settings of a method's approximate plans as one text.

    Evidence on one setting says nothing about another.
    """
    return ", ".join(method_named(method).evidence_terms(config))


class CertifiedObserver(RequestObserver):
    """Observer that serves an approximate plan only where the config's certificate does.

    A certificate that cannot be used, opens no rule, or is of a looser bound or of another version,
    setting or epoch, withholds every approximate plan. The log says so once, and each request has
    the reason.
    """

    def __init__(self, config: SemanticCacheConfig) -> None:
        assert config.certificate is not None
        self._certificate: Certificate | None = None
        self._last_warning = ""
        try:
            self._certificate = Certificate.read(config.certificate)
            self._problem = _mismatch(self._certificate, config)
        except ConfigError as error:
            self._problem = str(error)

        if self._problem:
            self._warn(self._problem)

    def review_decision(self, prepared: Prepared, decision: Decision) -> Decision:
        """Withhold the chosen plan if it is approximate and no rule serves it."""
        if not decision.plan.approximate:
            return decision
        refused = self._refused(prepared, decision)

        return decision.without(refused) if refused else decision

    def _refused(self, prepared: Prepared, decision: Decision) -> str:
        # From what never changes to what is this plan's alone, so that the reason is the most
        # general.
        certificate, plan = self._certificate, decision.plan
        if certificate is None or self._problem:
            return self._problem

        if prepared.epoch != certificate.epoch:
            self._warn(
                reason := f"{CERTIFICATE} is of another model or engine: it names "
                f"{certificate.model} on {certificate.engine}"
            )
            return reason

        level, tokens = plan.match.level if plan.match is not None else "", len(prepared.token_ids)
        if (plan.method, level) != (certificate.method, certificate.level):
            return (
                f"{CERTIFICATE} is not of such a hit: it covers "
                f"{certificate.method} of {certificate.level} text"
            )

        risk = risk_of(plan.method, features_of(plan, decision.donor_search, tokens))
        if certificate.serves(risk, tokens):
            return ""
        if tokens > certificate.longest:
            return (
                f"{CERTIFICATE} has no prompt as long in its log: {tokens} "
                f"tokens, {certificate.longest} at most"
            )
        return (
            f"{CERTIFICATE} does not serve such a plan: its risk is "
            f"{risk:.3f}, {certificate.cutoff or 0:.3f} at most"
        )

    def _warn(self, reason: str) -> None:
        # Once for each reason: every request would log it otherwise.
        if reason != self._last_warning:
            self._last_warning = reason
            logger.warning("nothing approximate is served: %s", reason)


def certified_setting(config: SemanticCacheConfig) -> str:
    """Return the settings of blends that a certificate covers, as one text."""
    # Certificates name no share where none is asked for, as before there was one.
    share = f", gain share {config.min_gain_share:g}" if config.min_gain_share else ""
    setting = setting_of("blend", config)
    return f"{setting}, donors {config.blend_donors}, gain {config.min_gain}{share}"


def _mismatch(certificate: Certificate, config: SemanticCacheConfig) -> str:
    """Return why a certificate does not cover these settings; empty if it does."""
    requested_bound, current_setting = config.error_bound, certified_setting(config)
    # A stricter certificate keeps a looser bound, but not the other way round.
    if requested_bound is not None and certificate.error_bound > requested_bound:
        return (
            f"{CERTIFICATE} is of another bound: error_bound is "
            f"{certificate.error_bound:g}, {requested_bound:g} is asked for"
        )
    if certificate.dejakv_version != __version__:
        return (
            f"{CERTIFICATE} is of another version of dejakv: "
            f"{certificate.dejakv_version}, here {__version__}"
        )
    if certificate.setting != current_setting:
        return (
            f"{CERTIFICATE} is of another setting: {certificate.setting!r}, "
            f"here {current_setting!r}"
        )
    if certificate.cutoff is None:
        return f"{CERTIFICATE} opens no rule: its log has too few hits, or too many wrong ones"

    return ""
