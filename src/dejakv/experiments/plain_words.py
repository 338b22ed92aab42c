"""Results in words: a figure as text, and the sentences of a run's summary for terminal and report."""

from collections.abc import Mapping, Sequence
from typing import Any

from dejakv.decide.plan import APPROXIMATE
from dejakv.errors import counted
from dejakv.store.counters import FAILED_WRITES

NAMED = 5
"""Most samples named that could not run."""


def share(value: float | None) -> str:
    """`12.5%`; `-` for what was not measured."""
    return "-" if value is None else f"{value:.1%}"


def figure(value: float | None) -> str:
    """`1,234.5`; `-` for what was not measured."""
    return "-" if value is None else f"{value:,.6g}"


def interval(ends: Sequence[float] | None) -> str:
    """`10.1% to 15.3%`; `-` for what was not measured."""
    return "-" if ends is None else f"{ends[0]:.1%} to {ends[1]:.1%}"


def estimated(rate: float | None, ends: Sequence[float] | None) -> str:
    """`12.5% (95%: 10.1% to 15.3%)`; `-` for what was not measured."""
    return "-" if rate is None else f"{rate:.1%} (95%: {interval(ends)})"


def short(text: str, max_characters: int) -> str:
    """The text on one line, cut after so many characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= max_characters else f"{flat[:max_characters]}..."


def in_words(summary: Mapping[str, Any]) -> list[str]:
    """Of a run, beside its verdict: hits, the error bound, times and sizes, and what went wrong; of a dry run the hits that it would have had."""
    lines = _live(summary) if "arms" in summary else [*_dry(summary), *shares_in_words(summary)]
    warning = [f"WARNING {summary['warning']}"] if summary.get("warning") else []
    return [*lines, *_not_run(summary.get("not_run") or {}), *warning]


def _dry(summary: Mapping[str, Any]) -> list[str]:
    judged = (
        "judged by the data set's answers: a live run also counts answers that the model changes between two right wordings"
        if summary["judged"]
        else "no hit was judged, because the data set has no answers (or blend was asked for, which gives none of the donor's)"
    )

    hits = estimated(summary["hit_rate"], summary["hit_rate_interval"])
    plans = ", ".join(f"{name} {count}" for name, count in summary["plans"].items())
    return [f"hit rate {hits}", judged, f"plans: {plans}"]


def _live(summary: Mapping[str, Any]) -> list[str]:
    lines = _hits(summary) + bound_in_words(summary.get("trust"))
    if (kl := summary.get("kl_mean")) is not None:
        top1 = share(summary["top1"])
        lines.append(f"cache: KL of the first token {kl:.4f}, same likeliest token along the answer {top1}")
    # The first sentence is the verdict's.
    lines += speed_in_words(summary)[1:]
    skipped = {name: count for name, count in summary.get("hook_counts", {}).items() if "skip" in name}
    lines += [f"embedding hook, {name}: {count} times" for name, count in skipped.items()]
    if (lookup := summary["lookup_ms"])["p50"] is not None:
        lines.append(f"lookup p50 {lookup['p50']:.2f} ms, p95 {lookup['p95']:.2f} ms")
    if "store_bytes" in summary:
        lines.append(f"store {summary['store_bytes'] / 1e6:.1f} MB in {summary['store_entries']} chunks")
    if writes := summary.get("failed_writes", {}):
        failed, reasons = counted(sum(writes.values()), "write"), FAILED_WRITES
        why = ", ".join(f"{count:,} because {reasons.get(reason, reason)}" for reason, count in writes.items())
        lines.append(f"WARNING {failed} of state failed ({why}): nothing of it was reused.")

    return lines


def _hits(summary: Mapping[str, Any]) -> list[str]:
    if summary["hit_rate"] is None:
        return []
    hits = estimated(summary["hit_rate"], summary["hit_rate_interval"])
    lines = [
        f"hit rate {hits}; of the other requests {summary['prefix_hits']} began with an exact prefix of a stored one"
    ]
    if summary["agreement"] is not None:
        stored = summary.get("stored_answers", {"known": 0})
        if stored["known"]:
            lines.append(
                f"stored answers (--answers keep): {stored['known']} of these hits have one, which would come at once; it is full "
                f"computation's in {stored['agree']}"
            )
        lines.append(
            f"this is one draw of the samples (--seed {summary.get('seed', 0)}): a sweep over `seed` shows how other draws differ"
        )

    return lines


def verdict(summary: Mapping[str, Any]) -> list[str]:
    """Speed, answers, how much of the prompts was computed before, and what follows for the reader."""
    speed = speed_in_words(summary)[:1]
    lines = [*speed, *_answers(summary), *shares_in_words(summary)]
    if speed:
        # _speed says this only beyond the noise, so the sentence itself is the test.
        pays = "as fast to the first token" in speed[0]
        first = "Reuse pays for prompts like these" if pays else "Reuse beyond prefixes did not show a gain here"
        lines.append(f"{first}. What a log of yours holds: `dejakv estimate LOG`")

    return lines


def _answers(summary: Mapping[str, Any]) -> list[str]:
    """Share of answers equal to full computation's, and changes by bf16 alone, if measured."""
    if summary["agreement"] is None:
        return []
    count, approximate = summary["samples"], summary["by_method"].keys() & APPROXIMATE
    first, whole = (round(summary[name] * count) for name in ("agreement_first", "agreement"))
    ends = interval(summary["agreement_interval"])
    note = " Such answers are approximate, and labelled; `--reuse exact` changes none." if approximate else ""
    lines = [
        f"Answers as in full computation: the first token in {first} of {count}, the whole answer in {whole} (95%: {ends}).{note}"
    ]
    if rounding := summary.get("rounding"):
        first, whole, count = rounding["same_first"], rounding["same"], rounding["samples"]
        alone = f"the first token in {first} of {count}, the whole answer in {whole}"
        lines.append(f"Rounding alone (bf16 beside fp32, nothing reused): {alone}.")

    return lines


def bound_in_words(trust: Mapping[str, Any] | None) -> list[str]:
    """Result of the error bound; nothing without a bound."""
    if trust is None:
        return []

    rules = f", {trust['rules']} rules" if trust["rules"] else ""
    audited = f", {trust['audited']} of them audited ({trust['wrong']} wrong)" if trust["served"] else ""
    lost = f", {trust['lost']} labels lost" if trust["lost"] else ""
    upper = (
        ""
        if trust["upper"] is None
        else f"; at most {share(trust['upper'])} of what is served now is wrong ({share(trust['confidence'])} confidence, "
        "if hits do not come in bursts of near-duplicates, which share one outcome)"
    )
    return [
        f"error bound {share(trust['delta'])}: {trust['gate']}{rules}; {trust['explored']} hits computed both ways "
        f"({trust['explored_wrong']} wrong), {trust['served']} served{audited}{lost}{upper}"
    ]


def speed_in_words(summary: Mapping[str, Any]) -> list[str]:
    """The cache's speed against prefix caching over all requests, and how far times of equal work were apart in this run."""
    beyond = summary.get("beyond_prefix")
    # Prefix caching always begins empty, so that a filled cache is no fair comparison.
    if summary.get("started_with_chunks"):
        return [
            f"the cache began with {summary['started_with_chunks']} stored chunks, prefix with none: no verdict on TTFT"
        ]
    if not beyond or not beyond.get("ttft_ratio_interval"):
        return []

    ratio = beyond["tokens_ratio"]
    tokens = "no tokens computed by either" if ratio is None else f"with {100 * ratio:.0f}% of the tokens computed"
    agreement = summary.get("agreement")
    equal = "answers not compared" if agreement is None else f"{share(agreement)} of the answers as in full computation"
    times = (beyond["ttft_difference_ms"], *beyond["ttft_difference_interval"])
    unit, scale = ("s", 1e-3) if abs(times[0]) >= 100 else ("ms", 1.0)
    mean, low, high = (scale * time for time in times)
    lines = [
        f"{_speed(beyond)} over all {summary['samples']} requests, {tokens}, {equal}: {mean:+.2f} {unit} a request (95%: {low:+.2f} to {high:+.2f})."
    ]
    if (noise := beyond.get("noise")) is not None:
        low, high = noise["ttft_ratio_interval"]
        lines.append(
            f"Noise of this run: over {counted(noise['requests'], 'request')} with equal work prefix caching took "
            f"{noise['ttft_ratio']:.2f} times the time to the first token of none (95%: {low:.2f} to {high:.2f})."
        )

    return lines


def _speed(beyond: Mapping[str, Any]) -> str:
    """Faster or slower, with the interval, only where the 95% intervals of the ratio and of the paired difference lie beyond what chance
    and the run's noise explain; otherwise the reason."""
    noise, ratio = beyond.get("noise"), beyond["ttft_ratio"]
    noise_low, noise_high = noise["ttft_ratio_interval"] if noise else (1.0, 1.0)
    # Noise counts alike to both sides: a ratio of .8 is as far from 1 as 1.25.
    explained = max(noise_high, 1 / noise_low)
    (low, high), (before, after) = beyond["ttft_ratio_interval"], beyond["ttft_difference_interval"]
    if after < 0 and high < 1 / explained:
        return (
            f"{1 / ratio:.1f} times as fast to the first token as prefix caching (95%: {1 / high:.1f} to {1 / low:.1f})"
        )
    if before > 0 and low > explained:
        by = f"{100 * (ratio - 1):.0f}% (95%: {100 * (low - 1):.0f}% to {100 * (high - 1):.0f}%)"
        return f"Slower to the first token than prefix caching by {by}"
    why = f"no more than noise in this run (equal work took {noise_low:.2f} to {noise_high:.2f} times as long)"
    if noise is None or before <= 0 <= after:
        why = "no difference that this run can show"
    return f"Time to the first token {ratio:.2f} times prefix caching's (95%: {low:.2f} to {high:.2f}), which is {why},"


def _not_run(errors: Mapping[str, str]) -> list[str]:
    """The samples that could not run, counted, and the first of them with their reasons; nothing where all did."""
    if not errors:
        return []
    named = [f"  {name}: {reason}" for name, reason in list(errors.items())[:NAMED]]
    more = [f"  and {len(errors) - NAMED} more, in samples.jsonl"] if len(errors) > NAMED else []
    return [f"{counted(len(errors), 'sample')} could not run, and no figure counts them:", *named, *more]


def shares_in_words(summary: Mapping[str, Any]) -> list[str]:
    """How much of the prompts was in earlier ones; nothing where it was not measured."""
    if "share_prefix" not in summary:
        return []
    prefix, anywhere = share(summary["share_prefix"]), share(summary["share_anywhere"])
    stood = f"{prefix} stood in the prefixes of earlier prompts, and {anywhere} anywhere in them"
    return [f"Of the prompts' tokens, {stood}."]
