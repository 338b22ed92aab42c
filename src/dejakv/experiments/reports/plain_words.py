"""Results in words: figures as text, and the sentences of a run's summary."""

from collections.abc import Mapping, Sequence
from typing import Any

from dejakv.decide.plan import EXACT_METHODS
from dejakv.errors import count_noun
from dejakv.store.counters import FAILED_WRITES

MAX_NAMED_SAMPLES = 5
"""Most samples named that could not run."""


def share(value: float | None) -> str:
    """Format a share as `12.5%`, or `-` for what was not measured."""
    return "-" if value is None else f"{value:.1%}"


def figure(value: float | None) -> str:
    """Format a number as `1,234.5`, or `-` for what was not measured."""
    return "-" if value is None else f"{value:,.6g}"


def interval(ends: Sequence[float] | None) -> str:
    """Format an interval as `10.1% to 15.3%`, or `-` for what was not measured."""
    return "-" if ends is None else f"{ends[0]:.1%} to {ends[1]:.1%}"


def estimated(rate: float | None, ends: Sequence[float] | None) -> str:
    """Format an estimate as `12.5% (95%: 10.1% to 15.3%)`, or `-` for what was not measured."""
    return "-" if rate is None else f"{rate:.1%} (95%: {interval(ends)})"


def short(text: str, max_characters: int) -> str:
    """Return the text on one line, cut after `max_characters` with `...` behind."""
    flat = " ".join(text.split())
    return flat if len(flat) <= max_characters else f"{flat[:max_characters]}..."


def run_sentences(summary: Mapping[str, Any]) -> list[str]:
    """Return the sentences about a run that stand beside its verdict.

    They tell hits, the error bound, times and sizes, and what went wrong; of a dry run the hits
    that it would have had.
    """
    lines = _live(summary) if "arms" in summary else [*_dry(summary), *shares_in_words(summary)]
    # At the end, where a reader of a terminal looks first.
    warning = [f"WARNING {summary['warning']}"] if summary.get("warning") else []
    return [*lines, *_not_run(summary.get("not_run") or {}), *warning]


def _dry(summary: Mapping[str, Any]) -> list[str]:
    judged = (
        "judged by the data set's answers: a live run also counts answers that the model changes"
        " between two right wordings"
        if summary["judged"]
        else (
            "no hit was judged, because the data set has no answers (or blend was asked for, which"
            " gives none of the donor's)"
        )
    )

    hits = estimated(summary["hit_rate"], summary["hit_rate_interval"])
    plans = ", ".join(f"{name} {count}" for name, count in summary["plans"].items())
    return [f"hit rate {hits}", judged, f"plans: {plans}"]


def _live(summary: Mapping[str, Any]) -> list[str]:
    lines = _hits(summary) + bound_in_words(summary.get("trust"))
    if (kl := summary.get("kl_mean")) is not None:
        top1 = share(summary["top1"])
        lines.append(
            f"cache: KL of the first token {kl:.4f}, same likeliest token along the answer {top1}"
        )

    # The first sentence is the verdict's.
    lines += speed_in_words(summary)[1:]
    skipped = {
        name: count for name, count in summary.get("hook_counts", {}).items() if "skip" in name
    }
    lines += [f"embedding hook, {name}: {count} times" for name, count in skipped.items()]
    if (lookup := summary["lookup_ms"])["p50"] is not None:
        lines.append(f"lookup p50 {lookup['p50']:.2f} ms, p95 {lookup['p95']:.2f} ms")
    if "store_bytes" in summary:
        lines.append(
            f"store {summary['store_bytes'] / 1e6:.1f} MB in {summary['store_entries']} entries"
        )
    if writes := summary.get("failed_writes", {}):
        failed, reasons = count_noun(sum(writes.values()), "write"), FAILED_WRITES
        why = ", ".join(
            f"{count:,} because {reasons.get(reason, reason)}" for reason, count in writes.items()
        )
        lines.append(f"WARNING {failed} of state failed ({why}): nothing of it was reused.")

    return lines


def _hits(summary: Mapping[str, Any]) -> list[str]:
    if summary["hit_rate"] is None:
        return []
    hits = estimated(summary["hit_rate"], summary["hit_rate_interval"])
    lines = [
        f"hit rate {hits}; of the other requests {summary['prefix_hits']} began with an exact"
        " prefix of a stored one"
    ]
    if summary["agreement"] is not None:
        stored = summary.get("stored_answers", {"known": 0})
        if stored["known"]:
            lines.append(
                f"stored answers (--answers keep): {stored['known']} of these hits have one, which"
                f" would come at once; it is full computation's in {stored['agree']}"
            )
        lines.append(
            f"this is one draw of the samples (--seed {summary.get('seed', 0)}): a sweep over"
            " `seed` shows how other draws differ"
        )

    return lines


def verdict(summary: Mapping[str, Any]) -> list[str]:
    """Return the verdict on a run, in sentences.

    They tell speed, answers, how much of the prompts was computed before, and what follows for the
    reader.
    """
    speed = speed_in_words(summary)[:1]
    lines = [*speed, *_answers(summary), *shares_in_words(summary)]
    if speed:
        # _speed says this only beyond the noise, so the sentence itself is the test.
        pays = "as fast to the first token" in speed[0]
        first = (
            "Reuse pays for prompts like these"
            if pays
            else "Reuse beyond prefixes did not show a gain here"
        )
        lines.append(f"{first}. What a log of yours holds: `dejakv estimate LOG`")

    return lines


def _answers(summary: Mapping[str, Any]) -> list[str]:
    """Say which share of answers is full computation's, and what bf16 alone changes, if known."""
    if summary["agreement"] is None:
        return []
    count, approximate = summary["samples"], summary["by_method"].keys() - EXACT_METHODS
    first, whole = (round(summary[name] * count) for name in ("agreement_first", "agreement"))
    ends = interval(summary["agreement_interval"])
    note = (
        " Such answers are approximate, and labelled; `--reuse exact` changes none."
        if approximate
        else ""
    )
    lines = [
        f"Answers as in full computation: the first token in {first} of {count}, the whole answer"
        f" in {whole} (95%: {ends}).{note}"
    ]
    if rounding := summary.get("rounding"):
        first, whole, count = rounding["same_first"], rounding["same"], rounding["samples"]
        alone = f"the first token in {first} of {count}, the whole answer in {whole}"
        lines.append(f"Rounding alone (bf16 beside fp32, nothing reused): {alone}.")

    return lines


def bound_in_words(trust: Mapping[str, Any] | None) -> list[str]:
    """Say what came of the error bound; nothing without a bound."""
    if trust is None:
        return []

    rules = f", {trust['rules']} rules" if trust["rules"] else ""
    audited = (
        f", {trust['audited']} of them audited ({trust['wrong']} wrong)" if trust["served"] else ""
    )
    lost = f", {trust['lost']} labels lost" if trust["lost"] else ""
    upper = (
        ""
        if trust["upper"] is None
        else (
            f"; at most {share(trust['upper'])} of what is served now is wrong"
            f" ({share(trust['confidence'])} confidence, if hits do not come in bursts of"
            " near-duplicates, which share one outcome)"
        )
    )
    return [
        f"error bound {share(trust['delta'])}: {trust['gate']}{rules}; {trust['explored']} hits"
        f" computed both ways ({trust['explored_wrong']} wrong), {trust['served']}"
        f" served{audited}{lost}{upper}"
    ]


def speed_in_words(summary: Mapping[str, Any]) -> list[str]:
    """Compare the cache's speed with prefix caching's over all requests, beside the run's noise.

    A cache that began with stored entries gets no verdict. Without both arms there is no sentence.
    """
    beyond = summary.get("beyond_prefix")
    # Prefix caching always begins empty, so that a filled cache is no fair comparison.
    if summary.get("started_with_chunks"):
        return [
            f"the cache began with {summary['started_with_chunks']} stored entries, prefix with"
            " none: no verdict on TTFT"
        ]
    if not beyond or not beyond.get("ttft_ratio_interval"):
        return []

    ratio = beyond["tokens_ratio"]
    tokens = (
        "no tokens computed by either"
        if ratio is None
        else f"with {100 * ratio:.0f}% of the tokens computed"
    )
    agreement = summary.get("agreement")
    equal = (
        "answers not compared"
        if agreement is None
        else f"{share(agreement)} of the answers as in full computation"
    )
    times = (beyond["ttft_difference_ms"], *beyond["ttft_difference_interval"])
    unit, scale = ("s", 1e-3) if abs(times[0]) >= 100 else ("ms", 1.0)
    mean, low, high = (scale * time for time in times)
    lines = [
        f"{_speed(beyond)} over all {summary['samples']} requests, {tokens}, {equal}: {mean:+.2f}"
        f" {unit} a request (95%: {low:+.2f} to {high:+.2f})."
    ]
    if (noise := beyond.get("noise")) is not None:
        low, high = noise["ttft_ratio_interval"]
        lines.append(
            f"Noise of this run: over {count_noun(noise['requests'], 'request')} with equal work"
            f" prefix caching took {noise['ttft_ratio']:.2f} times the time to the first token of"
            f" none (95%: {low:.2f} to {high:.2f})."
        )

    return lines


def _speed(beyond: Mapping[str, Any]) -> str:
    """Say whether the cache is faster or slower, with the interval.

    It says so only where the 95% intervals of the ratio and of the paired difference lie beyond
    what chance and the run's noise explain, and otherwise gives the reason.
    """
    noise, ratio = beyond.get("noise"), beyond["ttft_ratio"]
    noise_low, noise_high = noise["ttft_ratio_interval"] if noise else (1.0, 1.0)
    # Noise counts alike to both sides: a ratio of .8 is as far from 1 as 1.25.
    explained = max(noise_high, 1 / noise_low)

    # Both must agree: one interval alone may lie on one side by chance.
    (low, high), (before, after) = beyond["ttft_ratio_interval"], beyond["ttft_difference_interval"]
    if after < 0 and high < 1 / explained:
        return (
            f"{1 / ratio:.1f} times as fast to the first token as prefix caching (95%:"
            f" {1 / high:.1f} to {1 / low:.1f})"
        )
    if before > 0 and low > explained:
        by = f"{100 * (ratio - 1):.0f}% (95%: {100 * (low - 1):.0f}% to {100 * (high - 1):.0f}%)"
        return f"Slower to the first token than prefix caching by {by}"
    why = (
        f"no more than noise in this run (equal work took {noise_low:.2f} to {noise_high:.2f} times"
        " as long)"
    )
    if noise is None or before <= 0 <= after:
        why = "no difference that this run can show"
    return (
        f"Time to the first token {ratio:.2f} times prefix caching's (95%: {low:.2f} to"
        f" {high:.2f}), which is {why},"
    )


def _not_run(errors: Mapping[str, str]) -> list[str]:
    """Count the samples that could not run, and name the first with their reasons."""
    if not errors:
        return []
    named = [f"  {name}: {reason}" for name, reason in list(errors.items())[:MAX_NAMED_SAMPLES]]
    more = (
        [f"  and {len(errors) - MAX_NAMED_SAMPLES} more, in samples.jsonl"]
        if len(errors) > MAX_NAMED_SAMPLES
        else []
    )
    return [
        f"{count_noun(len(errors), 'sample')} could not run, and no figure counts them:",
        *named,
        *more,
    ]


def shares_in_words(summary: Mapping[str, Any]) -> list[str]:
    """Say how much of the prompts was in earlier ones; nothing where it was not measured."""
    if "share_prefix" not in summary:
        return []
    prefix, anywhere = share(summary["share_prefix"]), share(summary["share_anywhere"])
    stood = f"{prefix} stood in the prefixes of earlier prompts, and {anywhere} anywhere in them"
    return [f"Of the prompts' tokens, {stood}."]
