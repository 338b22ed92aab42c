"""`dejakv frontier`: how much must be recomputed before blended answers are those of full computation."""

from pathlib import Path
from typing import Annotated

import typer


def frontier_command(
    model: Annotated[
        str, typer.Option(help="docs-lm reads documents of facts; any other model real text.")
    ] = "docs-lm",
    samples: Annotated[int, typer.Option(help="Cases of each kind of change.")] = 300,
    output: Annotated[Path, typer.Option(help="Folder; a stopped run in it is continued.")] = Path("runs/frontier"),
    facts: Annotated[
        int | None,
        typer.Option(help="Facts in a document, 20 of about 10 tokens; of real text passages, 4 of about 130."),
    ] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Kinds of change, repeatable; all if not given.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Ways of blending, repeatable: strict, default, loose, or as settings.json of a run names them."
        ),
    ] = None,
    detail: Annotated[
        int | None, typer.Option(help="Cases on which every map, selector and share is measured.")
    ] = None,
    seed: Annotated[int, typer.Option()] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
) -> None:
    """Measure accuracy, KL divergence, stale answers and time over the share that is recomputed."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from dejakv.errors import ConfigError
    from dejakv.experiments.frontier import run_frontier
    from dejakv.experiments.frontier.report import brief

    if threads is not None and not 1 <= threads <= 1024:
        raise ConfigError(f"--threads {threads}: give a number from 1 to 1024")
    if threads is not None:
        torch.set_num_threads(threads)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("cases", total=None)
        report = run_frontier(
            model, samples, output, facts=facts, kinds=kind or (), only=only or (), seed=seed, detail=detail,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    Console().print(brief(report["rows"]))
    typer.echo(f"written to {output}/frontier.json, frontier-table.md and, with matplotlib, frontier.png")
