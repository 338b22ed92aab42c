"""How close an answer is to full computation: divergence of the next token, agreement along an answer, and the labelled hits of an
error bound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.decide.bound import setting_of
from dejakv.decide.plan import Decision
from dejakv.experiments.labels import LabelledHit
from dejakv.idle import seen
from dejakv.pipeline import Answer, Pipeline
from dejakv.request import Request
from dejakv.trust import features as trust
from dejakv.trust.differs import NAMED, Seen, divergence
from dejakv.trust.features import features_of

STEPS = 16

LogProbabilities = NDArray[np.float32]


@dataclass(frozen=True)
class Fidelity:
    """One sample against full computation, along full computation's own answer (teacher forcing).

    kl    Kullback-Leibler divergence of the first token from full computation's, in nats
    top1  share of the answer's first `STEPS` tokens with the same likeliest token
    """

    kl: float
    top1: float


def fidelity(wanted: LogProbabilities | None, got: LogProbabilities | None) -> Fidelity | None:
    """Of two arrays `[tokens, vocabulary]` of log probabilities; None if one is missing."""
    if wanted is None or got is None or not len(wanted):
        return None
    same = wanted.argmax(axis=-1) == got.argmax(axis=-1)
    return Fidelity(float(divergence(wanted[:1], got[:1])[0]), float(same.mean()))


def means(values: Sequence[Fidelity]) -> dict[str, Any]:
    """`kl_mean` and `top1` over samples, None if there are none."""
    if not values:
        return {"kl_mean": None, "top1": None}
    return {"kl_mean": float(np.mean([v.kl for v in values])), "top1": float(np.mean([v.top1 for v in values]))}


class Labels:
    """What the gates of some pipelines were told. `taken` follows a request's idle time."""

    def __init__(self, pipelines: Mapping[str, Pipeline]) -> None:
        self._told: dict[str, tuple[bool, Seen | None]] = {}
        for pipeline in pipelines.values():
            if pipeline.cache is not None:
                pipeline.cache.queue.on_label = self._note

    def _note(self, draw: str, wrong: bool, reused: Seen | None) -> None:
        self._told[draw] = wrong, reused

    def taken(self, decision: Decision) -> tuple[bool | None, Seen | None]:
        """Whether the approximate answer was wrong, None where that was not found out, and that answer where the label ran it."""
        draw = decision.trial.draw if decision.trial is not None else None
        return self._told.pop(draw.id, (None, None)) if draw is not None else (None, None)


def labelled(
    pipeline: Pipeline,
    request: Request,
    answer: Answer,
    full: Answer | None,
    told: Labels,
    wanted: LogProbabilities | None,
    got: LogProbabilities | None,
) -> LabelledHit | None:
    """The would-be hit of a request, None where there was none, or nothing says whether it was right.

    full    the answer without reuse. Where both are greedy it is compared with what was served; elsewhere there is the gate's label
    wanted  its log probabilities along its own first tokens, and `got` those of what was served along the same
    """
    decision = answer.decision
    if decision is None or pipeline.cache is None:
        return None
    wrong, reused = told.taken(decision)
    plan = decision.trial.plan if decision.trial is not None else decision.plan
    if not plan.approximate:
        return None
    config = pipeline.cache.config
    known: dict[str, Any] = {
        "request": request.id,
        "method": plan.method,
        "setting": setting_of(plan.method, config),
        "features": features_of(plan, decision.found, decision.tokens),
        "score": plan.match.score if plan.match is not None else None,
        "donor": plan.donors[0].id,
        "prompt_tokens": decision.tokens,
    }
    if not answer.record.approximate:  # it was held back, or was found not to be worth it
        if wrong is None:
            return None
        if reused is not None:
            known["computed_tokens"] = reused.computed
            known |= _compared(wanted, reused.continued(full.token_ids[:STEPS]) if full is not None else None)
        return LabelledHit(**known, wrong={config.differs: wrong})
    if full is None or not request.sampling.greedy:
        return None
    sides = seen(full.completion), seen(answer.completion)
    found = {name: differs.wrong(request, *sides) for name, differs in NAMED.items()}
    known["wrong"] = found if wrong is None else {**found, config.differs: wrong}
    known["computed_tokens"] = answer.record.computed_tokens
    return LabelledHit(**known, **_compared(wanted, got))


def _compared(wanted: LogProbabilities | None, got: LogProbabilities | None) -> dict[str, Any]:
    """How far the approximate run's first token is from full computation's, and how certain it was, as far as it is known."""
    near = fidelity(wanted, got)
    known: dict[str, Any] = {"kl": near.kl} if near is not None else {}
    return {**known, **certainty(got)} if got is not None and len(got) else known


def certainty(logs: LogProbabilities) -> dict[str, float]:
    """Entropy and margin (the best less the second) of the first token's log probabilities `[tokens, vocabulary]`, in nats."""
    sure = trust.certainty(logs[0])
    return {"entropy": sure["first_entropy"], "margin": sure["first_margin"]}
