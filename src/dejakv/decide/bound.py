"""Error bound as an observer: it may withhold the chosen plan, and queues its label."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.config import SemanticCacheConfig
from dejakv.decide.plan import Decision, Method, Observer, Plan, Trial
from dejakv.decide.queue import SettlingQueue
from dejakv.request import Prepared
from dejakv.trust.differs import Seen
from dejakv.trust.draw import Draw
from dejakv.trust.features import LATE_BLEND, TIME_SHARE, certainty, features_of, orders
from dejakv.trust.gate import Gate

BOUND = "error bound"
"""How the reason begins where the bound does not let an approximate plan run."""


class ErrorBound(Observer):
    """Draws for every approximate plan whether to serve it, and whether to label it in idle time.

    gate    evidence on wrong answers; draws
    queue   of would-be hits to label; None: the caller handles the draws
    """

    def __init__(self, gate: Gate, config: SemanticCacheConfig, queue: SettlingQueue | None = None) -> None:
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
            why = "nothing of this request is kept, so that its answer could not be checked"
            return decision.without(f"{BOUND}: {why}")
        # Late: judged by its first token, after a trial run.
        late = decision.ask.tells_first_token and plan.method == "blend" and orders(self._config.differs)
        method, setting = LATE_BLEND if late else plan.method, setting_of(plan.method, self._config)
        cls = self._gate.class_of(prepared.request.partition, prepared.epoch, method, setting)
        features = features_of(plan, decision.found, len(prepared.token_ids))
        if late:
            tried, exact = plan.seconds, decision.exact.seconds
            features[TIME_SHARE] = tried / exact if tried is not None and exact else 0.0
        if late and self._gate.tries(cls, features):
            trial = Trial(plan)
            decision = replace(decision, trial=trial)

            def accept(logs: NDArray[np.float32]) -> str:
                trial.draw = draw = self._gate.draw(cls, {**features, **certainty(logs)})
                self._note(draw, prepared, decision)
                return "" if draw.served else f"{BOUND}: {draw.reason}"

            return replace(decision, plans=(replace(plan, accept=accept), *decision.plans[1:]))
        draw = self._gate.draw(cls, features, late=late)
        decision = replace(decision, trial=Trial(plan, draw))
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
            answer = Seen(ran.text, ran.token_ids) if compared else None
            queue.answered(trial.draw, answer, approximate=plan.approximate)

    def _note(self, draw: Draw, prepared: Prepared, decision: Decision) -> None:
        """Queue the label, before a token is seen."""
        if self._queue is not None:
            self._queue.label(draw, prepared.request, prepared.epoch, decision)


def setting_of(method: Method, config: SemanticCacheConfig) -> str:
    """Settings of a method's approximate plans: evidence on one setting says nothing about another."""
    if method == "blend":
        made = [config.blend_map, config.blend.told, f"generation {config.max_generation}"]
    elif method == "top_layer":
        made = [f"tail {config.top_layer_tail}", f"donors {config.blend_donors}"]
    else:
        made = [config.index_encoder, f"score {config.similarity_threshold:g}", f"media {config.media}"]
        made += [*config.embedding_layers, *config.levels, "words" if config.lexical_guard else "no words"]
    return ", ".join(made)
