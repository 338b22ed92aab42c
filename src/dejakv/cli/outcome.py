"""What `dejakv run` does once its settings are known: one run or several seeds, and what is printed of them."""

import typer
from rich.console import Console

from dejakv.cli.progress import run_with_progress, watching
from dejakv.errors import ConfigError
from dejakv.experiments.earlier_run import REMEDY
from dejakv.experiments.run import RunResult
from dejakv.experiments.seeds import SeedResults, run_seeds, show_seeds
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.table import show


def run_and_show(
    settings: RunSettings, seeds: int | None, *, log_samples: bool, resume: bool, disagreements: int
) -> None:
    """Runs with progress on standard error, prints the report, and ends with 130 after an interrupt."""
    if seeds is not None:
        _seeds(settings, seeds, log_samples, resume)
        return
    result = run_with_progress(settings, log_samples, resume)
    if result.earlier:
        typer.echo(f"the run in {result.output} is finished, and was not measured again: {REMEDY} to do that", err=True)
    show(result.summary, result.rows, disagreements=disagreements)
    if result.output is not None:
        typer.echo(f"written to {result.output}: {', '.join(sorted(path.name for path in result.output.iterdir()))}")
    if result.stopped:
        _stopped(f"after {len(result.rows)} of {result.summary['stopped_before']} samples", result)


def _seeds(settings: RunSettings, count: int, log_samples: bool, resume: bool) -> None:
    with watching(Console(stderr=True), log_samples=log_samples) as watch:
        done = run_seeds(settings, count, watch, resume=resume, keep_earlier=True)
    earlier = [str(seed) for seed, result in zip(done.seeds, done.results, strict=True) if result.earlier]
    if earlier:
        typer.echo(
            f"finished before: seed {', '.join(earlier)} in {done.output}, not measured again: {REMEDY} to do that",
            err=True,
        )
    for line in settings.implied:
        typer.echo(line)
    show_seeds(done)
    if done.output is not None:
        typer.echo(f"written to {done.output}: a folder for each seed, and summary.json")
    if done.stopped:
        _stopped(f"in seed {done.seeds[-1]}", done)


def _stopped(where: str, done: RunResult | SeedResults) -> None:
    again = "add --resume to the same command to continue" if done.output is not None else "nothing was kept"
    typer.echo(f"dejakv: stopped {where}: {again}", err=True)
    raise typer.Exit(130)


def constants(given: str | None) -> tuple[float, ...] | None:
    """The numbers of `--costs`. Raises: ConfigError for what is no list of numbers."""
    try:
        return tuple(float(part) for part in given.split(",")) if given else None
    except ValueError as error:
        raise ConfigError(f"--costs {given!r}: give four numbers with commas, such as 4e-3,1.3e-6,1e-9,2e-4") from error
