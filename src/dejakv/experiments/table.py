"""The tables of a run, for a terminal and for the report, and the changed answers."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dejakv.errors import count_noun, printable
from dejakv.experiments.reports.plain_words import (
    estimated,
    figure,
    interval,
    run_sentences,
    share,
    short,
    verdict,
)
from dejakv.experiments.summary import SampleRow
from dejakv.records import Record

_MAX_REASON_ROWS = 8
_MAX_CELL_CHARACTERS = 120
_MAX_CHANGED_ANSWERS = 3
"""Changed answers that are printed."""


class TextTable(NamedTuple):
    """Table of texts, whose first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def has_words(self, place: int) -> bool:
        """Tell whether a column has words, which stand to the left, as figures do to the right."""
        return place == 0 or any(str(row[place]).lstrip("`")[:1].isalpha() for row in self.rows)

    def printed(self, box: Box | None = HEAVY_HEAD) -> Table:
        """Return the table for a rich console, framed by `box`."""
        table = Table(title=Text(printable(self.title)) if self.title else None, box=box)
        for place, column in enumerate(self.columns):
            table.add_column(
                Text(printable(column)),
                justify="left" if self.has_words(place) else "right",
                overflow="fold",
            )

        for row in self.rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        return table


Block = TextTable | str
"""A table or a sentence: what a terminal and a page show alike."""


def print_blocks(
    blocks: Iterable[Block], console: Console | None = None, box: Box | None = HEAVY_HEAD
) -> None:
    """Print tables, framed by `box`, and sentences as they are, not wrapped."""
    console = console or Console()
    for block in blocks:
        if isinstance(block, TextTable):
            console.print(block.printed(box))
        else:
            console.print(printable(block), soft_wrap=True, markup=False, highlight=False)


def show(
    summary: dict[str, Any], rows: Sequence[SampleRow] = (), console: Console | None = None
) -> None:
    """Print a run's or a dry run's details, some changed answers, and the verdict."""
    changed = _changed(changed_answers(rows)[:_MAX_CHANGED_ANSWERS])
    print_blocks(
        [*details(summary), *changed, *(verdict(summary) if "arms" in summary else ())], console
    )


def details(summary: Mapping[str, Any]) -> list[Block]:
    """Return the details of a run or a dry run.

    They are what was implied, the tables of arms, levels and what was not used, and further figures
    in words.
    """
    blocks: list[Block] = [*summary.get("implied", ())]
    if "arms" in summary:
        blocks.append(_arms(summary))
    if summary.get("by_level") or "judged" in summary:
        blocks.append(_levels(summary) if "arms" in summary else _would_hit(summary))
    return [*blocks, *refusal_table(summary.get("not_used", {})), *run_sentences(summary)]


def _arms(summary: Mapping[str, Any]) -> TextTable:
    arms: Sequence[Mapping[str, Any]] = list(summary["arms"].values())
    rows = [[name, *(f"{arm[key]:,}" for arm in arms)] for name, key in _COUNTS]

    if base := summary["arms"].get("none", {}).get("computed_tokens"):
        # Below the computed tokens; the accuracy goes on top only afterwards.
        rows.insert(2, ["  of none", *(share(arm["computed_tokens"] / base) for arm in arms)])
    if any(arm["accuracy"] is not None for arm in arms):
        rows.insert(
            0, ["accuracy", *(estimated(arm["accuracy"], arm["accuracy_interval"]) for arm in arms)]
        )
    for name, key, of in _TIMES:
        rows.append([name, *(f"{arm[key][of]:.2f}" for arm in arms)])
    title = f"{summary['samples']} samples of {summary['dataset']} through {model_of(summary)}"
    return TextTable(title, ("", *summary["arms"]), rows)


def model_of(summary: Mapping[str, Any]) -> str:
    """Return the model of a run and its dtype: `smollm2-135m in bf16`."""
    return summary["model"] + (f" in {dtype}" if (dtype := summary.get("dtype")) else "")


_COUNTS = (
    ("prompt tokens", "prompt_tokens"),
    ("computed tokens", "computed_tokens"),
    ("encoder runs", "encoder_runs"),
)
_TIMES = (
    ("TTFT p50 ms", "ttft_ms", "p50"),
    ("TTFT p95 ms", "ttft_ms", "p95"),
    ("TTFT mean ms", "ttft_ms", "mean"),
    ("latency p50 ms", "latency_ms", "p50"),
)


def _levels(summary: Mapping[str, Any]) -> TextTable:
    rows = [
        [
            level,
            str(row["hits"]),
            str(row["exact_hits"]),
            share(row["agreement"]),
            figure(row["false_hits"]),
        ]
        for level, row in summary["by_level"].items()
    ]
    columns = ("level", "hits", "of them exact", "agreement with full", "false hits")
    return TextTable("hits by level (prefix apart)", columns, rows)


def _would_hit(summary: Mapping[str, Any]) -> TextTable:
    every = {"hits": round(summary["hit_rate"] * summary["samples"]), **summary}
    rows = [
        [
            level, str(row["hits"]), str(row["judged"]), figure(row["false_hits"]),
            share(row["false_hit_rate"]), interval(row["false_hit_interval"]),
        ]
        for level, row in {**summary["by_level"], "all": every}.items()
    ]  # fmt: skip

    title = f"would-be hits: {summary['samples']} samples of {summary['dataset']}, decoder not run"
    return TextTable(
        title, ("level", "would hit", "judged", "false", "false-hit rate", "95%"), rows
    )


def refusal_table(reasons: Mapping[str, int]) -> list[TextTable]:
    """Return a table of the guards and rules that refused most; no table without a reason.

    It has at most eight rows, and of each row the most frequent reason.

    Parameters
    ----------
    reasons : mapping of str to int
        `not_used` of a summary: requests by reason, the most frequent first.
    """
    groups: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for reason, count in reasons.items():
        # A guard's reason begins with its name, a rule's may stand alone.
        who, colon, why = reason.partition(": ")
        groups[who if colon else "other"].append((why if colon else reason, count))

    rows: list[list[str]] = []

    for who, reason_counts in sorted(
        groups.items(), key=lambda item: -sum(count for _, count in item[1])
    )[:_MAX_REASON_ROWS]:
        more = f" (and {len(reason_counts) - 1} other reasons)" if len(reason_counts) > 1 else ""
        rows.append(
            [
                who,
                str(sum(count for _, count in reason_counts)),
                f"{reason_counts[0][0][:_MAX_CELL_CHARACTERS]}{more}",
            ]
        )

    return (
        [TextTable("found and not used", ("refused by", "requests", "most frequent reason"), rows)]
        if rows
        else []
    )


def changed_answers(rows: Iterable[SampleRow]) -> list[SampleRow]:
    """Return the rows whose `cache` answer differs from the exact one, in the order of the run."""
    return [row for row in rows if row.agrees("cache") is False]


def _changed(rows: Sequence[SampleRow]) -> list[TextTable]:
    """Return a table of these samples' answers beside full computation's; no table without rows."""
    cells = [
        [
            f"{row.sample_id}: {short(row.question, _MAX_CELL_CHARACTERS)}",
            row.exact.text if row.exact is not None else "",
            row.arms["cache"].text, origin(row), row.answer or "",
        ]
        for row in rows
    ]  # fmt: skip

    columns = ("sample", "computed in full", "with the cache", "from", "expected")
    return [TextTable("changed answers", columns, cells)] if rows else []


def origin(row: SampleRow) -> str:
    """Say where the cached answer came from: `hit (semantic_text), score 0.912`."""
    record = row.arms["cache"].record
    return record.provenance + ("" if record.score is None else f", score {record.score:.3f}")


NAMES = {"none": "no reuse", "prefix": "prefix caching", "cache": "DejaKV"}
"""Arms as a reader knows them."""


def workload_sentence(summary: Mapping[str, Any], rows: Sequence[SampleRow]) -> str:
    """Describe the work of a run in a sentence.

    It reads `20 prompts of repo, 600 to 2,000 tokens each, answers of up to 16, through
    smollm2-135m.`
    """
    records = [outcome.record for row in rows for outcome in row.arms.values()]
    each = ""
    if records:
        lengths = [record.prompt_tokens for record in records]
        answers = max(record.output_tokens for record in records)
        each = f", {min(lengths):,} to {max(lengths):,} tokens each, answers of up to {answers}"

    return (
        f"{count_noun(summary['samples'], 'prompt')} of {summary['dataset']}{each}, through"
        f" {model_of(summary)}."
    )


def headline(summary: Mapping[str, Any]) -> TextTable:
    """Return tokens and mean times of each arm.

    The last arm is DejaKV's; its share of prefix caching's (or of no reuse's) stands behind it.
    """
    arms: Mapping[str, Mapping[str, Any]] = summary["arms"]
    # Prefix caching is the fair comparison; no reuse only where it was not run.
    baseline_arm = next(
        (name for name in ("prefix", "none") if name in arms and "cache" in arms), ""
    )
    rows: list[Sequence[str]] = []
    for name, key, of, scale, unit in _FIGURES:
        values = {arm: figures[key][of] if of else figures[key] for arm, figures in arms.items()}
        cells = [
            "-" if value is None else f"{value / scale:,.{2 if unit else 0}f}{unit}"
            for value in values.values()
        ]
        baseline_value, cache_value = values.get(baseline_arm), values.get("cache")
        rows.append(
            (
                name,
                *cells,
                (
                    share(cache_value / baseline_value)
                    if baseline_value and cache_value is not None
                    else ""
                ),
            )
        )

    return TextTable(
        "",
        ("", *(NAMES[arm] for arm in arms), baseline_arm and f"of {NAMES[baseline_arm]}'s"),
        rows,
    )


_FIGURES = (
    ("tokens computed", "computed_tokens", None, 1, ""),
    ("time to first token, mean", "ttft_ms", "mean", 1000, " s"),
    ("time of a request, mean", "latency_ms", "mean", 1000, " s"),
)


def show_result(
    summary: Mapping[str, Any], rows: Sequence[SampleRow], console: Console | None = None
) -> None:
    """Print a live run's result, in at most 15 lines."""
    print_blocks(
        ["", workload_sentence(summary, rows), "", headline(summary), "", *verdict(summary)],
        console,
        box=None,
    )


def times(rows: Sequence[SampleRow]) -> TextTable:
    """Return where the time of a request went, in milliseconds of the mean request by arm."""
    arms = list(rows[0].arms) if rows else []
    records = {arm: [row.arms[arm].record for row in rows] for arm in arms}
    parts: Mapping[str, Callable[[Record], float]] = {
        "lookup": lambda record: record.lookup_ms,
        "state moved in": lambda record: record.inject_ms,
        "computed, until the first token": lambda record: (
            record.ttft_ms - record.lookup_ms - record.inject_ms
        ),
        "further tokens": lambda record: record.latency_ms - record.ttft_ms,
    }
    table = [
        (name, *(f"{max(0.0, fmean(map(part, records[arm]))):,.1f}" for arm in arms))
        for name, part in parts.items()
    ]

    return TextTable(
        "Where the time of a request went, ms",
        ("", *(NAMES[arm] for arm in arms)),
        table if arms else (),
    )
