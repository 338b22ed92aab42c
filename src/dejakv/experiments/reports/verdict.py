"""What came of a run, on one screen: what was asked, tokens and times beside prefix caching, answers, and what to do next."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console

from dejakv.decide.plan import APPROXIMATE
from dejakv.errors import counted
from dejakv.experiments.plain_words import rounding_in_words, share, speed_in_words
from dejakv.experiments.summary import Row
from dejakv.experiments.table import Sheet, say
from dejakv.records import Record

NAMES = {"none": "no reuse", "prefix": "prefix caching", "cache": "DejaKV"}
"""Arms as a reader knows them."""

OWN_LOG = "dejakv estimate LOG"


def asked(summary: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The work of a run in a sentence: `20 prompts of repo, 600 to 2,000 tokens each, through smollm2-135m.`"""
    lengths = [next(iter(row.arms.values())).record.prompt_tokens for row in rows if row.arms]
    each = f", {min(lengths):,} to {max(lengths):,} tokens each" if lengths else ""
    return f"{counted(summary['samples'], 'prompt')} of {summary['dataset']}{each}, through {summary['model']}."


def headline(summary: Mapping[str, Any]) -> Sheet:
    """Tokens and mean times of each arm, the last of which is DejaKV's; its share of prefix caching's (or of no reuse's) behind them."""
    arms: Mapping[str, Mapping[str, Any]] = summary["arms"]
    held_by = next((name for name in ("prefix", "none") if name in arms and "cache" in arms), "")
    rows: list[Sequence[str]] = []
    for name, key, of, scale, unit in _FIGURES:
        values = {arm: (figures[key][of] if of else figures[key]) for arm, figures in arms.items()}
        cells = ["-" if value is None else f"{value / scale:,.{2 if unit else 0}f}{unit}" for value in values.values()]
        held, ours = values.get(held_by), values.get("cache")
        rows.append((name, *cells, share(ours / held) if held and ours is not None else ""))
    return Sheet("", ("", *(NAMES[arm] for arm in arms), held_by and f"of {NAMES[held_by]}'s"), rows)


_FIGURES = (
    ("tokens computed", "computed_tokens", None, 1, ""),
    ("time to first token, mean", "ttft_ms", "mean", 1000, " s"),
    ("time of a request, mean", "latency_ms", "mean", 1000, " s"),
)


def show_result(summary: Mapping[str, Any], rows: Sequence[Row], console: Console | None = None) -> None:
    """Print a live run's result, in at most 15 lines."""
    console = console or Console()
    say(console, "", asked(summary, rows), "")
    console.print(headline(summary).printed(box=None))
    say(console, "", *verdict(summary))


def times(rows: Sequence[Row]) -> Sheet:
    """Where the time of a request went, in milliseconds of the mean request by arm."""
    arms = list(rows[0].arms) if rows else []
    records = {arm: [row.arms[arm].record for row in rows] for arm in arms}
    parts: Mapping[str, Callable[[Record], float]] = {
        "lookup": lambda record: record.lookup_ms,
        "state moved in": lambda record: record.inject_ms,
        "computed, until the first token": lambda record: record.ttft_ms - record.lookup_ms - record.inject_ms,
        "further tokens": lambda record: record.latency_ms - record.ttft_ms,
    }
    table = [
        (name, *(f"{max(0.0, fmean(map(part, records[arm]))):,.1f}" for arm in arms)) for name, part in parts.items()
    ]
    return Sheet("Where the time of a request went, ms", ("", *(NAMES[arm] for arm in arms)), table if arms else ())


def verdict(summary: Mapping[str, Any]) -> list[str]:
    """Speed, answers, how much of the prompts was computed before, and what follows for the reader."""
    speed, lines = speed_in_words(summary)[:1], _answers(summary)
    if "share_prefix" in summary:
        prefix, anywhere = share(summary["share_prefix"]), share(summary["share_anywhere"])
        stood = f"{prefix} stood in the prefixes of earlier prompts, and {anywhere} anywhere in them"
        lines.append(f"Of the prompts' tokens, {stood}.")
    if speed:
        pays = "as fast to the first token" in speed[0]
        first = "Reuse pays for prompts like these" if pays else "Reuse beyond prefixes did not show a gain here"
        lines.append(f"{first}. What a log of yours holds: {OWN_LOG}")
    return speed + lines


def _answers(summary: Mapping[str, Any]) -> list[str]:
    if summary["agreement"] is None:
        return []
    count, approximate = summary["samples"], summary["by_method"].keys() & APPROXIMATE
    first, whole = (round(summary[name] * count) for name in ("agreement_first", "agreement"))
    note = " Such answers are approximate, and labelled; `--reuse exact` changes none." if approximate else ""
    return [
        f"Answers as in full computation: the first token in {first} of {count}, the whole answer in {whole}.{note}",
        *rounding_in_words(summary.get("rounding")),
    ]
