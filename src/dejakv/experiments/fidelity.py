"""How close an answer is to full computation: divergence of the next token, and agreement along an answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.trust.differs import divergence

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
