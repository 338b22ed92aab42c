"""`python -m research.replay`: eviction policies on a trace."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dejakv.experiments.settings import SHARES_MODEL
from research.command import run


def replay_trace(
    trace: Annotated[
        Path,
        typer.Argument(
            help="JSON lines with hash_ids (Mooncake, vLLM), a log of prompts as for --dataset jsonl, or the folder of a run."
        ),
    ],
    budget: Annotated[
        list[str] | None,
        typer.Option(
            help="Size of the cache: tokens (500000), or a share of the trace's different tokens (5%); repeatable "
            "(default: 1%, 5% and 20%)."
        ),
    ] = None,
    block: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a block of the trace (default: found by its lengths).")
    ] = None,
    bytes_per_token: Annotated[
        int, typer.Option(min=0, help="Size of one token's state in bytes, to print budgets in bytes as well.")
    ] = 0,
    model: Annotated[str, typer.Option(help="Model whose tokenizer reads a log of prompts.")] = SHARES_MODEL,
    raw_prompts: Annotated[
        bool,
        typer.Option("--raw-prompts", help="Read the field 'prompt' of a log as it stands, without a chat template."),
    ] = False,
    output: Annotated[Path | None, typer.Option(help="New folder for replay.json.")] = None,
) -> None:
    """Replay a trace of requests through the store's eviction policies at a budget; no model runs."""
    from rich.console import Console

    from dejakv.cli.progress import watching
    from dejakv.experiments.output import make_folder, refuse_existing, replace_file
    from research.replay.prompts import load
    from research.replay.run import DEFAULT_BUDGETS, replay
    from research.replay.table import show

    if output is not None:
        refuse_existing(output / "replay.json", "the replay")
        make_folder(output)
    calls = load(trace, model, block, raw_prompts=raw_prompts)
    with watching(Console(stderr=True), counts="replays") as watch:
        result = {**replay(calls, budget or DEFAULT_BUDGETS, bytes_per_token=bytes_per_token, watch=watch)}
    result["trace"] = trace.name
    show(result, Console())
    if output is not None:
        replace_file(output / "replay.json", json.dumps(result, indent=2) + "\n", "--output")
        typer.echo(f"written to {output}: replay.json")


if __name__ == "__main__":
    run(replay_trace)
