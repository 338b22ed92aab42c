"""`dejakv run --seeds N`."""

import typer
from rich.console import Console

from dejakv.cli.progress import watching
from dejakv.experiments.seeds import run_seeds, show_seeds
from dejakv.experiments.settings import RunSettings


def seeds_command(settings: RunSettings, count: int, log_samples: bool, resume: bool) -> None:
    """Runs with several seeds, with progress on standard error, and prints the figures of each and of all."""
    with watching(Console(stderr=True), log_samples=log_samples) as watch:
        done = run_seeds(settings, count, watch, resume=resume)
    for line in settings.implied:
        typer.echo(line)
    show_seeds(done)
    if done.output is not None:
        typer.echo(f"written to {done.output}: a folder for each seed, and summary.json")
    if done.stopped:
        again = "add --resume to the same command to continue" if done.output is not None else "nothing was kept"
        typer.echo(f"dejakv: stopped in seed {done.seeds[-1]}: {again}", err=True)
        raise typer.Exit(130)
