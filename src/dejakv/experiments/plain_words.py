"""Results in words: a count with its noun, and a comparison in two sentences for readers who skip tables."""

from typing import Any

from dejakv.store.counters import FAILED_WRITES

NAMED = 5
"""Samples that could not run that are named."""


def counted(number: int, noun: str) -> str:
    """`1 prompt`, `2,000 prompts`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def in_plain_words(summary: dict[str, Any]) -> list[str]:
    """Speed of the cache against prefix caching over all requests, the noise of the run, and the numbers of changed answers and of failed
    writes."""
    beyond, failed = summary.get("beyond_prefix"), _failed(summary.get("failed_writes", {}))
    if not beyond or not beyond.get("ttft_ratio_interval"):
        return failed
    count = summary["samples"]
    lines = [f"{_speed(beyond)} over all {count} requests, {_tokens(beyond)}.", *noise_in_words(beyond)]
    if summary["agreement"] is not None:
        first, same = (round(summary[name] * count) for name in ("agreement_first", "agreement"))
        lines.append(f"First token the same in {first} of {count}, the whole answer in {same} of {count}.")
        lines.append(
            f"This is one draw of the samples (--seed {summary.get('seed', 0)}): a sweep over `seed` shows how other draws differ."
        )
    return lines + failed


def _failed(writes: dict[str, int]) -> list[str]:
    if not writes:
        return []
    reasons = ", ".join(f"{count:,} because {FAILED_WRITES.get(reason, reason)}" for reason, count in writes.items())
    return [f"WARNING {counted(sum(writes.values()), 'write')} of state failed ({reasons}): nothing of it was reused."]


def noise_in_words(beyond: dict[str, Any]) -> list[str]:
    """How far times of equal work were apart in this run; nothing where that is not known."""
    noise = beyond.get("noise")
    if noise is None:
        return []
    low, high = noise["ttft_ratio_interval"]
    return [
        f"Noise of this run: over {counted(noise['requests'], 'request')} with equal work prefix caching took "
        f"{noise['ttft_ratio']:.2f} x the time to the first token of none (95%: {low:.2f} to {high:.2f})."
    ]


def not_run_in_words(summary: dict[str, Any]) -> list[str]:
    """The samples that could not run, counted, and the first of them with their reasons; nothing where all did."""
    errors: dict[str, str] = summary.get("not_run") or {}
    if not errors:
        return []
    shown = [f"  {name}: {reason}" for name, reason in list(errors.items())[:NAMED]]
    more = [f"  and {len(errors) - NAMED} more, in samples.jsonl"] if len(errors) > NAMED else []
    return [f"{counted(len(errors), 'sample')} could not run, and no figure counts them:", *shown, *more]


def is_faster(beyond: dict[str, Any]) -> bool | None:
    """Whether the cache is faster (True) or slower (False) than prefix caching; None if this run cannot show it, since the 95%
    interval of the ratio or of the paired difference reaches into what chance or the run's noise explains."""
    noise = beyond.get("noise")
    low, high = noise["ttft_ratio_interval"] if noise else (1.0, 1.0)
    most = max(high, 1 / low)
    after, before = beyond["ttft_ratio_interval"], beyond["ttft_difference_interval"]
    if before[1] < 0 and after[1] < 1 / most:
        return True
    return False if before[0] > 0 and after[0] > most else None


def _speed(beyond: dict[str, Any]) -> str:
    """Faster or slower, with the interval, only where `is_faster` says so."""
    ratio, (low, high) = beyond["ttft_ratio"], beyond["ttft_ratio_interval"]
    faster = is_faster(beyond)
    if faster:
        return f"{1 / ratio:.1f} x as fast to the first token as prefix caching (95%: {1 / high:.1f} to {1 / low:.1f})"
    if faster is not None:
        within = f"(95%: {100 * (low - 1):.0f}% to {100 * (high - 1):.0f}%)"
        return f"Slower to the first token than prefix caching by {100 * (ratio - 1):.0f}% {within}"
    took = f"Time to the first token {ratio:.2f} x prefix caching's (95%: {low:.2f} to {high:.2f})"
    return f"{took}, {no_claim(beyond)},"


def no_claim(beyond: dict[str, Any]) -> str:
    """Why nothing is claimed: by its own interval there may be no difference, or equal work differs as much."""
    noise, (low, high) = beyond.get("noise"), beyond["ttft_difference_interval"]
    if noise is None or low <= 0 <= high:
        return "which is no difference that this run can show"
    low, high = noise["ttft_ratio_interval"]
    return f"which is within this run's noise ({low:.2f} to {high:.2f})"


def _tokens(beyond: dict[str, Any]) -> str:
    ratio = beyond["tokens_ratio"]
    return "no tokens computed by either" if ratio is None else f"with {100 * ratio:.0f}% of the tokens computed"


def shares_in_words(summary: dict[str, Any]) -> list[str]:
    """The shares as lines for a terminal."""
    prefix, anywhere = summary["share_prefix"], summary["share_anywhere"]
    lines = [
        f"tokens in prefix blocks of earlier prompts: {prefix:.1%} (prefix caching saves these at best)",
        f"tokens anywhere in earlier prompts: {anywhere:.1%} (in runs of 32 or more)",
        f"beyond prefix caching: {max(0.0, anywhere - prefix):.1%}, what reuse at any position can save at best",
    ]
    if not summary.get("shares_complete", True):
        lines.append("the prompts were too many to remember all: the share found anywhere is a lower bound")
    return lines
