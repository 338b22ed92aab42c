"""A trace through every policy at every budget: hit rates beside an infinite cache and Belady's."""

from collections.abc import Callable, Sequence
from typing import Any

from dejakv import __version__
from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError, count_noun
from dejakv.experiments.summary import RunProgress
from research.replay.policies import Belady, Blocks, Infinite, Replayed, Segments
from research.replay.trace import Trace

DEFAULT_BUDGETS = ("1%", "5%", "20%")
POLICIES = ("lru", "lfu")
"""Of the store."""
DEFAULT_POLICY: str = SemanticCacheConfig().policy
CACHES: dict[str, Callable[[Trace, int], Replayed]] = {
    "belady": Belady,
    "blocks": Blocks,
    "lru": lambda trace, budget: Segments(trace, "lru", budget),
    "lfu": lambda trace, budget: Segments(trace, "lfu", budget),
}


def replay(
    trace: Trace, budgets: Sequence[str] = DEFAULT_BUDGETS, watch: RunProgress | None = None
) -> dict[str, Any]:
    """The figures of `replay.json`.

    budgets  tokens (`500000`), or a share of the trace's different tokens (`5%`)

    A row has `hit_rate` (share of prompt tokens not computed), `requests_hit`, `evictions` and
    `of_belady` (hit rate over Belady's).

    Raises: ConfigError for a wrong budget.
    """
    tokens, watch = (
        [budget_of(text, trace.distinct_tokens) for text in budgets],
        watch or RunProgress(),
    )
    watch.stage(f"replaying {count_noun(len(trace.calls), 'request')}")
    rows = [
        {
            **_row(trace, Infinite()),
            "policy": "infinite",
            "budget": "",
            "budget_tokens": None,
            "of_belady": None,
        }
    ]
    for text, budget in zip(budgets, tokens, strict=True):
        best = 0.0
        for name, make in CACHES.items():
            row = _row(trace, make(trace, budget))
            best = row["hit_rate"] if name == "belady" else best
            share = row["hit_rate"] / best if best else None
            rows.append(
                {**row, "policy": name, "budget": text, "budget_tokens": budget, "of_belady": share}
            )
            watch.sample(len(rows), 1 + len(tokens) * len(CACHES), None)
    return {
        "kind": "replay",
        "requests": len(trace.calls),
        "tokens": sum(call.tokens for call in trace.calls),
        "distinct_tokens": trace.distinct_tokens,
        "block": trace.block,
        "rows": rows,
        "nearest": nearest(rows),
        "default_policy": DEFAULT_POLICY,
        "dejakv_version": __version__,
    }


def nearest(rows: Sequence[dict[str, Any]]) -> str | None:
    """Return the store's policy with the highest mean hit rate over the budgets.

    It is None if all are equal, which decides nothing.
    """
    of_store = {
        name: [row["hit_rate"] for row in rows if row["policy"] == name] for name in POLICIES
    }
    means = {name: sum(rates) / len(rates) for name, rates in of_store.items() if rates}
    if len(set(means.values())) < 2:
        return None
    return max(means, key=lambda name: means[name])


def budget_of(text: str, distinct: int) -> int:
    """Tokens of a budget.

    Raises: ConfigError for neither a number of tokens nor a share of them.
    """
    try:
        budget = round(distinct * float(text[:-1]) / 100) if text.endswith("%") else int(text)
        if budget >= 1 and (not text.endswith("%") or float(text[:-1]) <= 100):
            return budget
    except (ValueError, OverflowError):
        pass
    raise ConfigError(
        f"--budget {text!r}: give tokens (500000), or a share of the trace's {distinct:,} different"
        " tokens (5%), at least one token"
    )


def _row(trace: Trace, cache: Replayed) -> dict[str, Any]:
    reused = [trace.reusable(call, cache.serve(call)) for call in trace.calls]
    return {
        "hit_rate": sum(reused) / sum(call.tokens for call in trace.calls),
        "requests_hit": sum(tokens > 0 for tokens in reused) / len(reused),
        "evictions": cache.evictions,
    }
