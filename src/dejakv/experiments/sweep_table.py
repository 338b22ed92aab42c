"""The rows of a sweep as a table for a terminal."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def show(lines: Iterable[Mapping[str, Any]], console: Console) -> None:
    """Prints a row an experiment, with its error if it failed."""
    table = Table(title="sweep")
    for title in ("experiment", "hit rate", "agree", "false", "computed", "TTFT ms"):
        table.add_column(title, justify="left" if title == "experiment" else "right", no_wrap=title != "experiment")
    failed: list[str] = []
    for line in lines:
        name = str(line["name"])
        if line["error"]:
            table.add_row(name, "failed")
            failed.append(f"{name}: {line['error']}")
            continue
        table.add_row(
            name, _share(line["hit_rate"]), _share(line["agreement"]), _text(line["false_hits"]),
            _ratio(line["computed_cache"], line["computed_none"]), _text(line["ttft_p50_cache"]),
        )  # fmt: skip
    console.print(table)
    console.print(
        "agree: answers equal to those of full computation; false: hits with another answer; computed: share of the prompts' tokens "
        "that the cache computed; TTFT: median of the cache", soft_wrap=True, style="dim",
    )  # fmt: skip
    for text in failed:
        console.print(f"failed: {text}", soft_wrap=True, markup=False, highlight=False)


def number(value: Any) -> float | None:
    """A figure of a row, which a CSV gives as text; None if it was not measured."""
    return None if value in (None, "") else float(value)


def _share(value: Any) -> str:
    found = number(value)
    return "-" if found is None else f"{found:.1%}"


def _text(value: Any) -> str:
    found = number(value)
    return "-" if found is None else f"{found:g}"


def _ratio(part: Any, whole: Any) -> str:
    some, all = number(part), number(whole)
    return f"{some / all:.1%}" if some is not None and all else "-"
