"""Features of an approximate plan, and the risk that orders hits by them.

The bound holds for any order. A good one opens rules sooner and serves more under them. Evidence
belongs to a `RISK_VERSION`, and another order begins anew.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

RISK_VERSION = 2

LATE_BLEND = "late blend"
"""Method of a blend judged by its first token (`first_margin`).

A refused one was computed for nothing.
"""

TIME_SHARE = "time_share"
"""Feature of a late blend that is known before the try.

It is the try's time as a share of the exact plan's; 0 without costs. See `rules.LONG_TRY`.
"""


def features_of(plan: Any, donor_search: Any, tokens: int) -> dict[str, float]:
    """Return the features of a plan for a prompt of `tokens` tokens.

    Returns
    -------
    dict[str, float]
        `share_rows`, recomputed tokens as a share of the prompt. `score` of the best donor, a
        cosine or the share of the prompt that is copied text. `generation`, the greatest depth of
        the donors. Where text was copied also `seams`, the number of runs, and `longest_new`, the
        longest stretch outside of them as a share of the prompt.
    """
    features = {
        "share_rows": 1 - plan.reused / tokens,
        "score": plan.match.score if plan.match else 0.0,
        "generation": max((donor.generation for donor in plan.donors), default=0),
    }
    if donor_search.copied is not None:
        features["seams"] = len(donor_search.runs)
        features["longest_new"] = (
            _longest_new(donor_search.runs, plan.prefix_tokens, tokens) / tokens
        )
    return {name: float(value) for name, value in features.items()}


def risk_of(method: str, features: Mapping[str, float]) -> float:
    """Return a number in [0, 1] that orders hits of a method, those likelier to be wrong last.

    A missing feature counts as the worst. The risk of a blend grows with the longest stretch that
    is new, the share of rows, the seams and the depth. On SmolLM2 the first alone orders as well as
    any mixture of the four. The risk of a late blend falls with the margin alone. That of adoption
    is 1 - score. Any other method is ordered as a blend.
    """
    if method == LATE_BLEND:
        risk = 1 / (1 + max(0.0, features.get("first_margin", 0.0)))
    elif method in ("adopt", "exact"):
        risk = 1 - features.get("score", 0.0)
    else:
        seams = features.get("seams", 8.0)
        parts = (
            (0.4, features.get("longest_new", 1.0)),
            (0.3, features.get("share_rows", 1.0)),
            (0.1, seams / (seams + 4)),
            (0.2, features.get("generation", 5.0) / 5),
        )
        risk = sum(weight * min(1.0, max(0.0, value)) for weight, value in parts)
    # NaN counts as the worst: no rule may serve what cannot be judged.
    return min(1.0, max(0.0, risk)) if math.isfinite(risk) else 1.0


LATE_CUTOFFS = tuple(
    risk_of(LATE_BLEND, {"first_margin": nats}) for nats in (2.0, 1.0, 0.5, 0.25, 0.0)
)
"""Cutoffs for late blends.

Nats mean the same on any traffic, while a pilot's quantiles of a cold cache fit no warm one.
"""


def _longest_new(runs: Sequence[tuple[int, int]], prefix_tokens: int, tokens: int) -> int:
    """Return the tokens of the longest stretch outside the prefix and all runs."""
    longest, covered = 0, prefix_tokens
    for start, length in sorted(runs):
        longest = max(longest, start - covered)
        # Runs may overlap, and a shorter one may lie within another.
        covered = max(covered, start + length)
    return max(longest, tokens - covered)


def orders(differs: str) -> bool:
    """Return whether the risk orders hits well for this `differs`.

    It does for tokens and texts, and does not for distributions.
    """
    return not differs.startswith("kl:")


def certainty(logs: NDArray[Any]) -> dict[str, float]:
    """Return the margin of the first token over the second, from log probabilities `[vocabulary]`.

    Returns
    -------
    dict[str, float]
        `first_margin`, the best log probability less the second, in nats.
    """
    # Only the two largest: a whole sort of a vocabulary takes longer.
    second, best = np.partition(np.asarray(logs, np.float64), -2)[-2:]
    return {"first_margin": float(best - second) if np.isfinite(second) else float("inf")}
