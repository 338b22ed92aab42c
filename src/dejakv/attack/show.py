"""The report of attacks: a table for a terminal, a JSON file for everything else."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dejakv import __version__
from dejakv.attack.base import Done
from dejakv.attack.scene import Scene

_STYLES = {"held": "green", "broken": "bold red", "not applicable": "dim"}


def show(done: Sequence[Done], console: Console) -> None:
    """A row an attack, and the figures of each below."""
    table = Table(title="Attacks")
    for name in ("attack", "tried", "result", "reason"):
        table.add_column(name, overflow="fold")
    for one in done:
        result = one.result
        verdict = f"[{_STYLES[result.verdict]}]{result.verdict}[/]"
        table.add_row(one.name, escape(result.tried), verdict, escape(result.reason))
    console.print(table)
    for one in done:
        if one.result.figures:
            console.print(f"[bold]{escape(one.name)}[/]")
        for name, figure in one.result.figures.items():
            console.print(f"  {escape(name)}: {escape(str(figure))}")


def report(done: Sequence[Done], scene: Scene) -> dict[str, Any]:
    """Everything, as JSON holds it."""
    return {
        "dejakv_version": __version__,
        "seed": scene.seed,
        "model": scene.model,
        "server": scene.remote,
        "broken": [one.name for one in done if one.result.verdict == "broken"],
        "attacks": [one.as_dict() for one in done],
    }
