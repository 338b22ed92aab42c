"""The result of a replay for a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

ABOUT = (
    "infinite forgets nothing; Belady's knows the future: no policy holds more at this budget; blocks is an engine's own prefix "
    "cache of blocks; the store evicts segments of up to 256 tokens"
)
_BARS = " ▁▂▃▄▅▆▇█"


def show(result: dict[str, Any], console: Console) -> None:
    """Prints a table of the policies, and the sentence on the default."""
    minutes = f" in {result['minutes']:.0f} minutes" if result["minutes"] else ""
    console.print(
        f"{result['requests']:,} requests{minutes}, {result['tokens']:,} tokens, {result['distinct_tokens']:,} of them different, "
        f"blocks of {result['block']}",
        soft_wrap=True,
    )
    table = Table(title="share of the prompts' tokens that need not be computed")
    wide = console.width >= 100
    for title in ("cache", "hit rate", "of Belady's", "requests hit", "evictions", *(("over time",) if wide else ())):
        table.add_column(title, justify="left" if title in ("cache", "over time") else "right", no_wrap=True)
    budget = None
    for row in result["rows"]:
        if row["budget"] != budget and row["budget_tokens"] is not None:
            budget = row["budget"]
            table.add_section()
            table.add_row(_budget(row))
        cells = [
            row["name"], f"{row['hit_rate']:.1%}",
            "-" if row["of_belady"] is None else f"{row['of_belady']:.1%}", f"{row['requests_hit']:.1%}", f"{row['evictions']:,}",
        ]  # fmt: skip
        table.add_row(*cells, *((_spark(row["over_time"]),) if wide else ()))
    console.print(table)
    for text in result["explained"]:
        console.print(text, soft_wrap=True)


def verdict(result: dict[str, Any]) -> str:
    """Which of the store's policies comes nearest to Belady's, beside the default."""
    nearest, default = result["nearest"], result["default_policy"]
    if nearest is None:
        return "on this trace the store's policies are equal"
    mark = (
        "the default" if nearest == default else f"the default is {default}: give --policy {nearest} for such traffic"
    )
    return f"of the store's policies, {nearest} comes nearest to Belady's on this trace ({mark})"


def _budget(row: dict[str, Any]) -> str:
    size = f", {row['budget_bytes'] / 1e9:.1f} GB" if row["budget_bytes"] else ""
    return f"{row['budget_tokens']:,} tokens{size}"


def _spark(rates: list[float]) -> str:
    return "".join(_BARS[min(8, int(rate * 8.999))] for rate in rates)
