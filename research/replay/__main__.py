"""`python -m research.replay`: eviction policies on a trace."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dejakv.experiments.settings import SHARES_MODEL
from research.command import run

NAMES = {"infinite": "infinite", "belady": "Belady's", "blocks": "blocks, lru"}


def replay_trace(
    trace: Annotated[
        Path,
        typer.Argument(
            help=(
                "JSON lines with hash_ids (Mooncake, vLLM), or a log of prompts as for --dataset"
                " log."
            )
        ),
    ],
    budget: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Size of the cache: tokens (500000), or a share of the trace's different tokens"
                " (5%); repeatable "
                "(default: 1%, 5% and 20%)."
            )
        ),
    ] = None,
    block: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in a block of the trace (default: found by its lengths)."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model whose tokenizer reads a log of prompts.")
    ] = SHARES_MODEL,
    output: Annotated[Path | None, typer.Option(help="New folder for replay.json.")] = None,
) -> None:
    """Replay a trace of requests through the store's eviction policies; no model runs."""
    from rich.console import Console

    from dejakv.cli.progress import watching
    from dejakv.experiments.output import make_folder, refuse_existing, replace_file
    from research.replay.run import DEFAULT_BUDGETS, replay
    from research.replay.trace import load

    if output is not None:
        refuse_existing(output / "replay.json", "the replay")
        make_folder(output)
    calls = load(trace, model, block)
    with watching(Console(stderr=True), counts="replays") as watch:
        result = {**replay(calls, budget or DEFAULT_BUDGETS, watch), "trace": trace.name}
    _show(result, Console())
    if output is not None:
        replace_file(output / "replay.json", json.dumps(result, indent=2) + "\n", "--output")
        typer.echo(f"written to {output}: replay.json")


def _show(result: dict[str, Any], console: Any) -> None:
    """Prints a table of the policies, and a sentence on the default."""
    from rich.table import Table

    table = Table(title="share of the prompts' tokens that need not be computed")
    for title in ("budget", "cache", "hit rate", "of Belady's", "requests hit", "evictions"):
        table.add_column(title, justify="left" if title == "cache" else "right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(
            f"{row['budget_tokens']:,}" if row["budget"] else "none",
            NAMES.get(row["policy"], f"store, {row['policy']}"),
            f"{row['hit_rate']:.1%}",
            f"{row['of_belady']:.1%}" if row["of_belady"] is not None else "-",
            f"{row['requests_hit']:.1%}", f"{row['evictions']:,}",
            end_section=row["policy"] in ("infinite", "lfu"),
        )  # fmt: skip
    nearest, default = result["nearest"], result["default_policy"]
    mark = (
        "the default"
        if nearest == default
        else f"the default is {default}: give --policy {nearest} for such traffic"
    )
    console.print(
        f"{result['requests']:,} requests, {result['tokens']:,} tokens,"
        f" {result['distinct_tokens']:,} of them different, blocks of {result['block']}",
        soft_wrap=True,
    )
    console.print(table)
    console.print(
        (
            f"of the store's policies, {nearest} comes nearest to Belady's on this trace ({mark})"
            if nearest
            else "on this trace the store's policies are equal"
        ),
        soft_wrap=True,
    )


if __name__ == "__main__":
    run(replay_trace)
