"""How close an answer is to full computation: divergence of the next token, and agreement along an answer; beside it, how close full
computation is to itself in another precision."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.idle import seen
from dejakv.request import Request
from dejakv.trust.differs import Differs, divergence

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


def noise_floor(engine: Any, requests: Sequence[Request], differs: Differs | None = None) -> dict[str, Any] | None:
    """Full computation in the engine's dtype against the other one of fp32 and bf16, along its own answers: `kl_mean`,
    `top1`, `samples`, `dtype` of the other, and `wrong`, the share of answers that differ by `differs`. None
    for an engine without a twin."""
    from dejakv.engines.transformers.continuation import twin_of
    from dejakv.engines.transformers.engine import TransformersEngine  # imports torch, only if needed

    if not requests or not isinstance(engine, TransformersEngine):
        return None
    plain = engine.for_arm("none")
    other = twin_of(plain)
    found: list[Fidelity] = []
    wrong: list[bool] = []
    for request in requests:
        prepared = plain.prepare(request)
        full, twin = plain.full(prepared), other.full(other.prepare(request))
        tokens = full.token_ids[:STEPS]
        value = fidelity(full.continued(tokens), twin.continued(tokens))
        if value is not None:
            found.append(value)
        if differs is not None:
            wrong.append(differs.wrong(request, seen(full), seen(twin)))
    return {
        **means(found),
        "samples": len(found),
        "dtype": str(other.model.dtype).removeprefix("torch."),
        "wrong": float(np.mean(wrong)) if wrong else None,
    }
