"""Answers that the cache changed, side by side with those of full computation."""

import io
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dejakv.experiments.summary import Row

_WIDTH = 120
_QUESTION = 160


def disagreements(rows: Iterable[Row]) -> list[Row]:
    """The rows whose `cache` answer differs from the exact one, in the order of the run."""
    return [row for row in rows if row.agrees("cache") is False]


def side_by_side(rows: Sequence[Row]) -> RenderableType:
    """One block a row: question, both answers, and the origin of the cached one. For a rich console."""
    return Group(*(_block(row) for row in rows))


def as_text(rows: Sequence[Row]) -> str:
    """All disagreements of a run as plain text, `disagreements.txt`."""
    changed = disagreements(rows)
    if not changed:
        return "No answer of the cache arm differs from full computation's.\n"
    buffer = io.StringIO()
    Console(file=buffer, width=_WIDTH, color_system=None).print(side_by_side(changed))
    return buffer.getvalue()


def _block(row: Row) -> Table:
    record = row.arms["cache"].record
    score = "" if record.score is None else f", score {record.score:.3f}"
    table = Table(title=Text(f"{row.sample_id}: {_short(row.question)}"), title_justify="left", expand=True)
    table.add_column("computed in full", ratio=1)
    table.add_column(f"with the cache: {record.provenance}{score}", ratio=1)
    table.add_row(Text(row.exact.text if row.exact is not None else ""), Text(row.arms["cache"].text))
    if row.answer is not None:
        table.caption = Text(f"expected: {row.answer}")
    return table


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _QUESTION else f"... {flat[-_QUESTION:]}"
