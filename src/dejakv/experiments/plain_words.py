"""Results in words: a count with its noun, and a comparison in two sentences for readers who skip tables."""

from typing import Any

from dejakv.store.counters import FAILED_WRITES


def counted(number: int, noun: str) -> str:
    """`1 prompt`, `2,000 prompts`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def in_plain_words(summary: dict[str, Any]) -> list[str]:
    """Speed of the cache against prefix caching over all requests, the number of changed answers, and that of failed writes."""
    beyond, failed = summary.get("beyond_prefix"), _failed(summary.get("failed_writes", {}))
    if not beyond or not beyond["ttft_ratio"]:
        return failed
    count = summary["samples"]
    lines = [f"{_speed(beyond)} over all {count} requests, {_tokens(beyond)}."]
    if summary["agreement"] is not None:
        first, same = (round(summary[name] * count) for name in ("agreement_first", "agreement"))
        lines.append(f"First token the same in {first} of {count}, the whole answer in {same} of {count}.")
        lines.append(
            f"This is one draw of the samples (--seed {summary.get('seed', 0)}): --seeds 5 shows how other draws differ."
        )
    return lines + failed


def _failed(writes: dict[str, int]) -> list[str]:
    if not writes:
        return []
    reasons = ", ".join(f"{count:,} because {FAILED_WRITES.get(reason, reason)}" for reason, count in writes.items())
    return [f"WARNING {counted(sum(writes.values()), 'write')} of state failed ({reasons}): nothing of it was reused."]


def _speed(beyond: dict[str, Any]) -> str:
    """Faster or slower only if the interval of the paired difference excludes zero."""
    low, high = beyond["ttft_difference_interval"]
    ratio = beyond["ttft_ratio"]
    if high < 0:
        return f"{1 / ratio:.1f} x as fast to the first token as prefix caching"
    if low > 0:
        return f"Slower to the first token than prefix caching by {100 * (ratio - 1):.0f}%"
    return f"Time to the first token {ratio:.2f} x prefix caching's, which is no difference that this run can show,"


def _tokens(beyond: dict[str, Any]) -> str:
    ratio = beyond["tokens_ratio"]
    return "no tokens computed by either" if ratio is None else f"with {100 * ratio:.0f}% of the tokens computed"
