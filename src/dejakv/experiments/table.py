"""The tables of a run, for a terminal and for the report, and the answers that the cache changed."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dejakv.experiments.plain_words import estimated, figure, in_words, interval, share, short
from dejakv.experiments.summary import Row

_MOST = 8
_LONGEST = 120
_CHANGED = 3
"""Changed answers that are printed."""


class Sheet(NamedTuple):
    """A table of texts. The first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def printed(self, box: Box | None = HEAVY_HEAD) -> Table:
        """As a table for a rich console, framed by `box`: figures to the right."""
        table = Table(title=Text(self.title) if self.title else None, box=box)
        for place, column in enumerate(self.columns):
            words = place == 0 or any(row[place][:1].isalpha() for row in self.rows)
            table.add_column(column, justify="left" if words else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table


def say(console: Console, *lines: str) -> None:
    """Prints lines as they are, not wrapped."""
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def show(summary: dict[str, Any], rows: Sequence[Row] = (), console: Console | None = None) -> None:
    """Prints a run's or a dry run's summary: tables, some changed answers, and the result in plain words."""
    console = console or Console()
    say(console, *summary.get("implied", ()))
    for sheet in [*sheets_of(summary), *_changed(changed_answers(rows)[:_CHANGED])]:
        console.print(sheet.printed())
    say(console, *in_words(summary))


def sheets_of(summary: Mapping[str, Any]) -> list[Sheet]:
    """The tables of a run: arms, levels and what was not used."""
    found = [_arms(summary)] if "arms" in summary else []
    if summary.get("by_level") or "judged" in summary:
        found.append(_levels(summary) if "arms" in summary else _would_hit(summary))
    return [*found, *unused(summary.get("not_used", {}))]


def _arms(summary: Mapping[str, Any]) -> Sheet:
    arms: Sequence[Mapping[str, Any]] = list(summary["arms"].values())
    rows = [[name, *(f"{arm[key]:,}" for arm in arms)] for name, key in _COUNTS]
    if base := summary["arms"].get("none", {}).get("computed_tokens"):
        rows.insert(2, ["  of none", *(share(arm["computed_tokens"] / base) for arm in arms)])
    if any(arm["accuracy"] is not None for arm in arms):
        rows.insert(0, ["accuracy", *(estimated(arm["accuracy"], arm["accuracy_interval"]) for arm in arms)])
    for name, key, of in _TIMES:
        rows.append([name, *(f"{arm[key][of]:.2f}" for arm in arms)])
    title = f"{summary['samples']} samples of {summary['dataset']} through {summary['model']}"
    return Sheet(title, ("", *summary["arms"]), rows)


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


def _levels(summary: Mapping[str, Any]) -> Sheet:
    rows = [
        [level, str(row["hits"]), str(row["exact_hits"]), share(row["agreement"]), figure(row["false_hits"])]
        for level, row in summary["by_level"].items()
    ]
    columns = ("level", "hits", "of them exact", "agreement with full", "false hits")
    return Sheet("hits by level (prefix apart)", columns, rows)


def _would_hit(summary: Mapping[str, Any]) -> Sheet:
    every = {"hits": round(summary["hit_rate"] * summary["samples"]), **summary}
    rows = [
        [
            level, str(row["hits"]), str(row["judged"]), figure(row["false_hits"]), share(row["false_hit_rate"]),
            interval(row["false_hit_interval"]),
        ]
        for level, row in {**summary["by_level"], "all": every}.items()
    ]  # fmt: skip
    title = f"would-be hits: {summary['samples']} samples of {summary['dataset']}, decoder not run"
    return Sheet(title, ("level", "would hit", "judged", "false", "false-hit rate", "95%"), rows)


def unused(reasons: Mapping[str, int]) -> list[Sheet]:
    """A row a guard or rule, from `not_used` of a summary (reason to requests, most frequent first); no table without a reason."""
    groups: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for reason, count in reasons.items():
        who, colon, why = reason.partition(": ")
        groups[who if colon else "other"].append((why if colon else reason, count))
    rows: list[list[str]] = []
    for who, found in sorted(groups.items(), key=lambda item: -sum(count for _, count in item[1]))[:_MOST]:
        more = f" (and {len(found) - 1} other reasons)" if len(found) > 1 else ""
        rows.append([who, str(sum(count for _, count in found)), f"{found[0][0][:_LONGEST]}{more}"])
    return [Sheet("found and not used", ("refused by", "requests", "most frequent reason"), rows)] if rows else []


def changed_answers(rows: Iterable[Row]) -> list[Row]:
    """The rows whose `cache` answer differs from the exact one, in the order of the run."""
    return [row for row in rows if row.agrees("cache") is False]


def _changed(rows: Sequence[Row]) -> list[Sheet]:
    """The first changed answers, each beside that of full computation."""
    cells = [
        [
            f"{row.sample_id}: {short(row.question, _LONGEST)}", row.exact.text if row.exact is not None else "",
            row.arms["cache"].text, origin(row), row.answer or "",
        ]
        for row in rows
    ]  # fmt: skip
    columns = ("sample", "computed in full", "with the cache", "from", "expected")
    return [Sheet("changed answers", columns, cells)] if rows else []


def origin(row: Row) -> str:
    """Where the cached answer came from: `hit (semantic_text), score 0.912`."""
    record = row.arms["cache"].record
    return record.provenance + ("" if record.score is None else f", score {record.score:.3f}")
