"""A trace through every policy at every budget: hit rates, over time, beside an infinite cache and Belady's."""

from collections.abc import Callable, Sequence
from typing import Any

from dejakv import __version__
from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError
from dejakv.experiments.plain_words import counted
from dejakv.experiments.summary import Progress
from research.replay.policies import Belady, Blocks, Infinite, Replayed, Segments
from research.replay.table import ABOUT, verdict
from research.replay.trace import Trace

WINDOWS = 20
DEFAULT_BUDGETS = ("1%", "5%", "20%")
NAMES = {"infinite": "infinite", "belady": "Belady's", "blocks": "blocks, lru"}
POLICIES = ("lru", "lfu")
"""Of the store."""
DEFAULT_POLICY: str = SemanticCacheConfig().policy


def replay(
    trace: Trace,
    budgets: Sequence[str] = DEFAULT_BUDGETS,
    *,
    bytes_per_token: int = 0,
    watch: Progress | None = None,
) -> dict[str, Any]:
    """The figures of `replay.json`.

    budgets          tokens (`500000`), or a share of the trace's different tokens (`5%`)
    bytes_per_token  size of a token's state, for the budgets in bytes; 0: they are not given

    A row has `hit_rate` (share of prompt tokens not computed), `requests_hit`, `whole` (requests of which all but the last
    token was held), `evictions`, `of_belady` (hit rate over Belady's) and `over_time`, the hit rate in equal parts of the trace.

    Raises: ConfigError for a wrong budget.
    """
    tokens, watch = [budget_of(text, trace.distinct_tokens) for text in budgets], watch or Progress()
    watch.stage(f"replaying {counted(len(trace.calls), 'request')}")
    rows = [_row(trace, "infinite", "", 0, Infinite())]
    for text, budget in zip(budgets, tokens, strict=True):
        part: list[dict[str, Any]] = []
        caches = _caches(trace, budget)
        for name, make in caches:
            part.append(_row(trace, name, text, budget, make()))
            watch.sample(len(rows) + len(part), 1 + len(tokens) * len(caches), None)
        best = part[0]["hit_rate"]
        for row in part:
            row["of_belady"] = row["hit_rate"] / best if best else None
            row["budget_bytes"] = budget * bytes_per_token or None
        rows += part
    times = [call.time for call in trace.calls if call.time is not None]
    result: dict[str, Any] = {
        "kind": "replay",
        "requests": len(trace.calls),
        "tokens": sum(call.tokens for call in trace.calls),
        "distinct_tokens": trace.distinct_tokens,
        "block": trace.block,
        "minutes": (times[-1] - times[0]) / 60e3 if times else None,
        "rows": rows,
        "nearest": nearest(rows),
        "default_policy": DEFAULT_POLICY,
        "dejakv_version": __version__,
    }
    return {**result, "explained": [ABOUT, verdict(result)]}


def nearest(rows: Sequence[dict[str, Any]]) -> str | None:
    """The store's policy with the highest mean hit rate over the budgets; None if all are equal, which decides nothing."""
    of_store = {name: [row["hit_rate"] for row in rows if row["policy"] == name] for name in POLICIES}
    means = {name: sum(rates) / len(rates) for name, rates in of_store.items() if rates}
    if len(set(means.values())) < 2:
        return None
    return max(means, key=lambda name: means[name])


def budget_of(text: str, distinct: int) -> int:
    """Tokens of a budget. Raises: ConfigError for what is neither a number of tokens nor a share of them."""
    try:
        budget = round(distinct * float(text[:-1]) / 100) if text.endswith("%") else int(text)
        if budget >= 1 and (not text.endswith("%") or float(text[:-1]) <= 100):
            return budget
    except (ValueError, OverflowError):
        pass
    raise ConfigError(
        f"--budget {text!r}: give tokens (500000), or a share of the trace's {distinct:,} different tokens (5%), at least one token"
    )


def _caches(trace: Trace, budget: int) -> list[tuple[str, Callable[[], Replayed]]]:
    caches: list[tuple[str, Callable[[], Replayed]]] = [
        ("belady", lambda: Belady(trace, budget)),
        ("blocks", lambda: Blocks(trace, budget)),
    ]
    caches += [(policy, lambda policy=policy: Segments(trace, policy, budget)) for policy in POLICIES]
    return caches


def _row(trace: Trace, name: str, text: str, budget: int, cache: Replayed) -> dict[str, Any]:
    calls = trace.calls
    windows = min(WINDOWS, len(calls))
    hit, asked = [0] * windows, [0] * windows
    requests = whole = 0
    for number, call in enumerate(calls):
        reused = trace.reusable(call, cache.serve(call))
        window = number * windows // len(calls)
        hit[window] += reused
        asked[window] += call.tokens
        requests += reused > 0
        whole += 0 < reused == call.tokens - 1
    return {
        "policy": name,
        "name": NAMES.get(name, f"store, {name}"),
        "budget": text,
        "budget_tokens": budget or None,
        "hit_rate": sum(hit) / sum(asked),
        "requests_hit": requests / len(calls),
        "whole": whole,
        "evictions": cache.evictions,
        "of_belady": None,
        "over_time": [one / all for one, all in zip(hit, asked, strict=True)],
    }
