"""From the rows of a tuning to a recommendation: most tokens saved with a false-hit rate that is shown to be low enough."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dejakv.experiments.scoring import wilson
from dejakv.trust.arithmetic import labels_needed


def recommend(rows: Sequence[Mapping[str, Any]], max_false_hits: float) -> dict[str, Any]:
    """The recommended settings and the reason.

    A row is shown to be right often enough if the upper end of its 95% interval of false hits is at most `max_false_hits`. Of
    those rows the one with the most tokens saved is taken, of equals the strictest. If there is none, exact reuse is
    recommended; `candidate` is then the row that more labels might show to be right, if there is one.
    """
    labelled = any(row["judged"] for row in rows)
    useful = [row for row in rows if row["hits"]]
    shown = [row for row in useful if row["judged"] and row["false_hit_interval"][1] <= max_false_hits]
    if shown:
        best = max(shown, key=_worth)
        return {"settings": _settings(best), "row": dict(best), "reason": _shown(best, max_false_hits)}
    exact: dict[str, Any] = {"settings": {"reuse": "exact"}, "row": None}
    if not useful:
        return {**exact, "reason": "no prompt would have been answered from a similar one: exact reuse loses nothing"}
    if not labelled:
        return {
            **exact,
            "reason": "whether a hit is right is unknown: add an 'answer' to the lines of the log, or give --label-with MODEL",
        }
    likely = [row for row in useful if row["judged"] and row["false_hit_rate"] <= max_false_hits]
    if not likely:
        return {**exact, "reason": f"every setting with hits is wrong in more than {max_false_hits:.1%} of them"}
    best = max(likely, key=_worth)
    return {**exact, "reason": _not_shown(best, max_false_hits), "candidate": _settings(best)}


def hits_needed(false_hit_rate: float, max_false_hits: float) -> int | None:
    """How many judged hits at this rate would show that it is at most `max_false_hits`; None if a million would not."""
    trials = 1
    while trials <= 1_000_000:
        if wilson(round(trials * false_hit_rate), trials)[1] <= max_false_hits:
            return trials
        trials = trials + max(1, trials // 50)
    return None


def labels_for(rows: Sequence[Mapping[str, Any]], samples: int, max_false_hits: float) -> dict[str, Any] | None:
    """What it would take to bound the share of wrong answers while serving (`--error-bound`) with the setting that saves most: `labels`,
    None where they would never do, the `prompts` that have so many hits, and the `false_hit_rate` that was assumed (0 if it is
    unknown). None if no setting has hits, and for a bound that says nothing."""
    useful = [row for row in rows if row["hits"]]
    if not useful or max_false_hits >= 1:
        return None
    row = max(useful, key=_worth)
    rate = row["false_hit_rate"] or 0.0
    labels = labels_needed(max_false_hits, wrong_share=rate) if rate < max_false_hits else None
    prompts = math.ceil(labels * samples / row["hits"]) if labels is not None else None
    return {"labels": labels, "prompts": prompts, "false_hit_rate": rate}


def _worth(row: Mapping[str, Any]) -> tuple[int, bool, float]:
    return row["tokens_saved"], row["lexical_guard"], row["threshold"] or 1.0


def _settings(row: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"reuse": "adopt", "lexical_guard": row["lexical_guard"]}
    if row["level"] == "exact_text":
        return {**settings, "semantic_text": False}
    return {**settings, "similarity_threshold": row["threshold"]}


def _rate(row: Mapping[str, Any]) -> str:
    low, high = row["false_hit_interval"]
    return f"{row['false_hits']} of {row['judged']} judged hits false (95%: {low:.1%} to {high:.1%})"


def _shown(row: Mapping[str, Any], most: float) -> str:
    return f"{_rate(row)}, which is shown to be at most {most:.1%}; of such settings it saves the most tokens"


def _not_shown(row: Mapping[str, Any], most: float) -> str:
    needed = hits_needed(row["false_hit_rate"], most)
    more = "" if needed is None else f"; about {needed:,} judged hits at this rate would show it"
    return f"no setting is shown to be wrong in at most {most:.1%} of its hits; the nearest has {_rate(row)}{more}"
