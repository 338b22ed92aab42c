"""`dejakv run`: ask many questions with and without the cache, and report savings and changes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from dejakv.cli.options import (
    FORMER_OPTIONS,
    SETTINGS_HELP,
    HelpAll,
    echo,
    ray_option,
    settings_command,
)
from dejakv.config import SemanticCacheConfig
from dejakv.experiments.settings import (
    SINGULARS,
    SWITCHES,
    RunSettings,
    default_for,
    preset_names,
    read_set,
    settings_from,
    split_settings,
)

GROUPS = {
    "Model": ("model", "engine", "device"),
    "Data set": ("dataset", "dataset_path", "max_samples"),
    "Reuse": ("reuse", "blend_quality", "similarity_threshold", "embedding_layers", "error_bound"),
    "Storage": ("store", "max_bytes"),
    "Run": ("cache_mode", "arms", "max_new_tokens", "seed"),
    "Output": ("output",),
}

Preset = Annotated[
    str | None,
    typer.Option(
        help=(
            f"Named settings, which the other options override: {', '.join(preset_names())}."
            " Without --preset and --model: the preset named like --dataset, or shapes."
        ),
        rich_help_panel="Model",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help=SETTINGS_HELP, rich_help_panel="More"),
]
Config = Annotated[
    Path | None,
    typer.Option(
        help="YAML or JSON file of settings by name, which the options override.",
        rich_help_panel="More",
    ),
]


def _run(
    preset: Preset = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the stopped run in the --output folder.",
            rich_help_panel="Output",
        ),
    ] = False,
    log_samples: Annotated[
        bool,
        typer.Option(
            "--log-samples", help="Print a line for each finished sample.", rich_help_panel="Output"
        ),
    ] = False,
    brief: Annotated[
        bool,
        typer.Option(
            "--brief",
            help="Print the result alone, and write report.html into --output.",
            rich_help_panel="Output",
        ),
    ] = False,
    ray: Annotated[str | None, ray_option("Run", hidden=True)] = None,
    ray_workers: Annotated[
        int,
        typer.Option(
            min=0,
            help=(
                "Workers of --ray, which share the samples (each takes every Nth) and one store; 0:"
                " one for each GPU, else each core."
            ),
            rich_help_panel="Run",
            hidden=True,
        ),
    ] = 0,
    set_: Set = None,
    config: Config = None,
    help_all: HelpAll = False,
    *,
    given: dict[str, Any],
) -> None:
    """Ask many questions with and without the cache: hits by level, tokens and encoder runs saved,
    time to first token (TTFT), answers changed.
    """
    # Before the imports, which take seconds: a wrong option is told at once.
    settings = resolve_settings(preset, given, set_ or (), config)
    from rich.console import Console

    from dejakv.cli.progress import watching
    from dejakv.experiments.reports.report import make_report
    from dejakv.experiments.run import run
    from dejakv.experiments.samples_log import REMEDY
    from dejakv.experiments.table import show, show_result

    with watching(Console(stderr=True), log_samples=log_samples) as watch:
        if ray is None:
            result = run(settings, watch, resume=resume)
        else:
            from dejakv.experiments.on_ray import RayCluster, run_on

            result = run_on(
                RayCluster.connect(ray), settings, watch, workers=ray_workers, resume=resume
            )

    if result.earlier:
        echo(
            f"the run in {result.output} is finished, and was not measured again: {REMEDY} to do"
            " that",
            err=True,
        )

    if brief and "arms" in result.summary:
        show_result(result.summary, result.rows)
    else:
        show(result.summary, result.rows)

    # A stopped run has no report: --resume finishes it, and writes one then.
    if brief and result.output is not None and not result.stopped:
        page = result.output / "report.html"
        make_report([result.output], page)
        echo(f"All figures and changed answers: {page.resolve().as_uri()}")
    elif result.output is not None:
        echo(
            f"written to {result.output}:"
            f" {', '.join(sorted(path.name for path in result.output.iterdir()))}"
        )

    # Status 130, as a shell reports an interrupt, so that a script does not go on.
    if result.stopped:
        where = f"after {len(result.rows)} of {result.summary['stopped_before']} samples"
        again = (
            "add --resume to the same command to continue"
            if result.output is not None
            else "nothing was kept"
        )
        echo(f"dejakv: stopped {where}: {again}", err=True)
        raise typer.Exit(130)


run_command = settings_command(
    _run,
    (RunSettings, SemanticCacheConfig),
    GROUPS,
    {**SWITCHES, **SINGULARS},
    skip=("cache", "implied"),
    more=FORMER_OPTIONS,
)


def resolve_settings(
    preset: str | None, option_values: dict[str, Any], assigned: Iterable[str], config: Path | None
) -> RunSettings:
    """Return the settings of a command.

    They are a preset's, those of a file, of `--set`, and of the options, each over those before.
    Without a preset and a model, the data set decides about both (`default_for`).

    Parameters
    ----------
    preset : str or None
        Name of a preset.
    option_values : dict
        Values of the options that were given.
    assigned : iterable of str
        `NAME=VALUE` of each `--set`.
    config : Path or None
        YAML or JSON file of settings.

    Raises
    ------
    ConfigError
        For an unknown setting, a wrong value, a file that cannot be read, and a data set that comes
        with no model.
    DatasetError
        For an unknown data set without a model.
    """
    from dejakv.experiments.sweep import read_file

    file_values: dict[str, Any] = {}
    if config is not None:
        file_values = read_file(config, "--config")
        preset = preset or file_values.pop("preset", None)

    run_part: dict[str, Any] = {}
    cache_part: dict[str, Any] = {}
    for where, values in (
        (f"--config {config}", file_values),
        ("--set", dict(map(read_set, assigned))),
        ("an option", option_values),
    ):
        run, cache = split_settings(values, where)
        run_part |= run
        cache_part |= cache

    # Neither a preset nor a model: the data set decides which preset is meant.
    if preset is None and "model" not in run_part:
        preset, chosen = default_for(run_part.get("dataset"), run_part.get("cache_mode"))
        run_part |= chosen
    return settings_from(preset, run_part, cache_part)
