"""`python -m research.frontier`: how much recomputation makes blended answers equal.

They are compared with the answers of full computation.
"""

from pathlib import Path
from typing import Annotated

import typer

from research.command import run


def frontier(
    model: Annotated[
        str,
        typer.Option(
            help="Model: docs-lm reads documents of facts, any other model reads real text."
        ),
    ] = "docs-lm",
    samples: Annotated[int, typer.Option(help="Cases of each kind of change.")] = 300,
    output: Annotated[
        Path, typer.Option(help="Output folder; a stopped run in it is continued.")
    ] = Path("runs/frontier"),
    facts: Annotated[
        int | None,
        typer.Option(
            help=(
                "docs-lm: facts in a document, about 10 tokens each (default: 20); other models:"
                " passages in a prompt, about 140 tokens each (default: 4)."
            )
        ),
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="Kind of change to measure; repeatable (default: all).")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Way of blending to measure; repeatable: strict, default, loose, or a name from"
                " settings.json of a run (default: all)."
            )
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the cases.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads (default: as torch chooses).")
    ] = None,
) -> None:
    """Measure accuracy, KL divergence, stale answers and time of blending, against the share of
    rows recomputed.
    """
    import torch
    from rich.console import Console

    from dejakv.cli.progress import watching
    from research.frontier.report import table
    from research.frontier.run import run_frontier

    if threads is not None:
        torch.set_num_threads(threads)
    with watching(Console(stderr=True), counts="cases") as watch:
        report = run_frontier(
            model,
            samples,
            output,
            facts=facts,
            kinds=kind or (),
            only=only or (),
            seed=seed,
            watch=watch,
        )
    typer.echo(table(report["rows"]))
    typer.echo(f"written to {output}/frontier.json and frontier-table.md")


if __name__ == "__main__":
    run(frontier)
