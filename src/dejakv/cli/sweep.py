"""`dejakv sweep`: many runs from one specification, or the ablation of every level."""

from typing import Annotated

import typer

from dejakv.cli.options import echo, ray_option


def sweep_command(
    specs: Annotated[
        str | None,
        typer.Option(
            help="JSON or YAML file with `experiments` or a `grid`, and optionally `defaults`."
        ),
    ] = None,
    log_file: Annotated[
        str, typer.Option(help="Log with a line for each experiment, a .csv file.")
    ] = "sweep.csv",
    samples_dir: Annotated[
        str | None, typer.Option(help="Folder for the samples and summary of each run.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the log: skip the experiments that succeeded."),
    ] = False,
    purge_cache_between_runs: Annotated[
        bool,
        typer.Option(
            "--purge-cache-between-runs",
            help="Delete the cache folders of an experiment before it runs.",
        ),
    ] = False,
    ablation: Annotated[
        bool, typer.Option("--ablation", help="Measure every level alone, at several thresholds.")
    ] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model of the ablation; repeatable (default: shapes-vlm)."),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Preset to start the ablation from.")
    ] = "shapes",
    max_samples: Annotated[int, typer.Option(help="Samples in each run of the ablation.")] = 128,
    ray: Annotated[str | None, ray_option()] = None,
) -> None:
    """Run experiments, log a line for each and print a table of all. The others run even if one
    fails; the exit status is then 1.

    With --ray they run side by side, one for each core or GPU, and their times are those of shared
    machines.
    """
    from rich.console import Console

    from dejakv.cli.progress import watching
    from dejakv.errors import ConfigError, count_noun
    from dejakv.experiments import sweep as sweeps
    from dejakv.experiments.sweep_log import read_log, sweep_blocks
    from dejakv.experiments.table import print_blocks

    if bool(specs) == ablation:
        raise ConfigError("give either --specs FILE or --ablation")
    if specs:
        spec = sweeps.read_file(specs, "--specs")
    else:
        # An ablation is a sweep like any other, so that its log can be resumed.
        dims = sweeps.layer_dims(preset)
        spec = sweeps.ablation(
            model or ["shapes-vlm"], dims, preset=preset, max_samples=max_samples
        )
    in_turn = None
    if ray is not None:
        from dejakv.experiments.on_ray import RayCluster, experiments_on

        in_turn = experiments_on(RayCluster.connect(ray))
    with watching(Console(stderr=True), counts="experiments" if ray else "samples") as watch:
        lines = sweeps.sweep(
            spec,
            log_file,
            samples_dir,
            resume=resume,
            purge=purge_cache_between_runs,
            watch=watch,
            lines=in_turn,
        )

    # The log as a whole, since a resumed sweep has lines from before.
    every = read_log(log_file)
    print_blocks(sweep_blocks(every))
    failed = sum(bool(line["error"]) for line in lines)
    skipped = len(every) - len(lines)
    echo(
        f"{count_noun(len(lines) - failed, 'run')}, {failed} failed, {skipped} skipped, logged in"
        f" {log_file}"
    )

    # After the table, so that the experiments that ran are seen in any case.
    if failed:
        raise typer.Exit(1)
