"""What is known of an approximate plan before it runs, and the order that it puts hits in.

The bound holds whatever the order is. A good order opens rules sooner and serves more under them. Evidence is kept by `RISK_VERSION`:
another order begins anew.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

RISK_VERSION = 1

LATE_BLEND = "late blend"
"""Method of a blend that is judged once it has its first logits: `first_margin` is then known, the log probability of its best token less
that of the second. What it is refused for has been computed."""

TIME_SHARE = "time_share"
"""Name of a feature of a late blend: what it takes, as a share of the exact plan's time; 0 where costs are not known. It is known before the
blend is tried, and rules go by it beside the risk (`grid.TIMES`)."""


class Donor(Protocol):
    @property
    def generation(self) -> int: ...


class Matched(Protocol):
    @property
    def score(self) -> float: ...


class Planned(Protocol):
    """A `find.ways.Plan`, as far as it is looked at here."""

    @property
    def method(self) -> str: ...
    @property
    def donors(self) -> Sequence[Donor]: ...
    @property
    def match(self) -> Matched | None: ...
    @property
    def reused(self) -> int: ...
    @property
    def kept(self) -> int: ...


class Known(Protocol):
    """A `find.found.Found`, as far as it is looked at here."""

    @property
    def copied(self) -> int | None: ...
    @property
    def runs(self) -> Sequence[tuple[int, int]]: ...


def features_of(plan: Planned, found: Known, tokens: int) -> dict[str, float]:
    """What is known of a plan for a prompt of `tokens` tokens; lengths are shares of the prompt.

    share_rows   rows that are computed
    score        of the best donor, a cosine, or the share of the prompt that is copied text
    donors       how many there are; `generation` of the one that most approximate state went into
    kept         an exact prefix that a blend leaves as it is
    copied       tokens that stand in donors, verified
    seams        runs of copied text; `longest_run` the longest of them, `longest_new` the longest stretch outside: only where
                 text was copied
    """
    known = {
        "share_rows": 1 - plan.reused / tokens,
        "score": plan.match.score if plan.match else 0.0,
        "donors": len(plan.donors),
        "generation": max((donor.generation for donor in plan.donors), default=0),
        "kept": plan.kept / tokens,
        "copied": (found.copied or 0) / tokens,
    }
    if found.copied is not None:
        known["seams"] = len(found.runs)
        known["longest_run"] = max((length for _, length in found.runs), default=0) / tokens
        known["longest_new"] = _longest_new(found.runs, plan.kept, tokens) / tokens
    return {name: float(value) for name, value in known.items()}


def risk_of(method: str, features: Mapping[str, float]) -> float:
    """A number in [0, 1] that orders hits of a method, likelier wrong ones last. What is not known counts as the worst.

    blend  grows with the longest stretch that is new, the share of rows, the seams and the generation. On SmolLM2 the first orders as
           well as any mixture of the four (docs/trust.md); so does that of top_layer
    late   falls with the margin alone
    adopt  grows with 1 - score, and where the second donor's score is near (`margin`)
    """
    if method in ("blend", "top_layer"):
        seams = features.get("seams", 8.0)
        parts = (
            (0.4, features.get("longest_new", 1.0)),
            (0.3, features.get("share_rows", 1.0)),
            (0.1, seams / (seams + 4)),
            (0.2, features.get("generation", 5.0) / 5),
        )
        risk = sum(weight * min(1.0, max(0.0, value)) for weight, value in parts)
    elif method == LATE_BLEND:
        risk = 1 / (1 + max(0.0, features.get("first_margin", 0.0)))
    else:
        risk = 0.9 * (1 - features.get("score", 0.0)) + 0.1 * (1 - min(1.0, max(0.0, features.get("margin", 0.0))))
    return min(1.0, max(0.0, risk)) if math.isfinite(risk) else 1.0


def _longest_new(runs: Sequence[tuple[int, int]], kept: int, tokens: int) -> int:
    """Tokens of the longest stretch outside the prefix and all runs, given as first token and length."""
    longest, covered = 0, kept
    for start, length in sorted(runs):
        longest = max(longest, start - covered)
        covered = max(covered, start + length)
    return max(longest, tokens - covered)
