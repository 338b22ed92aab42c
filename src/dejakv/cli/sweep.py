"""`dejakv sweep`: many runs from one specification, or the ablation of every level."""

from typing import Annotated, Any

import typer


def sweep_command(
    specs: Annotated[str | None, typer.Option(help="JSON file with defaults and experiments.")] = None,
    log_file: Annotated[str, typer.Option(help="CSV or JSON, a line a run.")] = "sweep.csv",
    samples_dir: Annotated[str | None, typer.Option(help="Folder for each run's samples and summary.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the log: skip what it already has.")] = False,
    purge_cache_between_runs: Annotated[
        bool, typer.Option("--purge-cache-between-runs", help="Delete an experiment's cache folders before it runs.")
    ] = False,
    ablation: Annotated[bool, typer.Option("--ablation", help="Every level alone, over thresholds.")] = False,
    model: Annotated[list[str] | None, typer.Option(help="Models of the ablation, repeatable.")] = None,
    preset: Annotated[str | None, typer.Option(help="Preset under the ablation.")] = "shapes",
    max_samples: Annotated[int, typer.Option(help="Samples a run of the ablation.")] = 128,
) -> None:
    """Run experiments one after another and log one line for each."""
    from dejakv.errors import ConfigError
    from dejakv.experiments.ablation import ablation as make_ablation
    from dejakv.experiments.ablation import layer_dims
    from dejakv.experiments.sweep import read_spec, sweep

    if bool(specs) == ablation:
        raise ConfigError("give either --specs FILE or --ablation")
    if specs:
        spec = read_spec(specs)
    else:
        spec = make_ablation(model or ["shapes-vlm"], layer_dims(preset), preset=preset, max_samples=max_samples)

    def report(name: str, summary: dict[str, Any]) -> None:
        if "error" in summary:
            typer.echo(f"{name}: failed: {summary['error']}")
            return
        shown = {key: summary.get(key) for key in ("hit_rate", "agreement")}
        figures = ", ".join(
            f"{key.replace('_', ' ')} {'not measured' if value is None else f'{value:.3f}'}"
            for key, value in shown.items()
        )
        typer.echo(f"{name}: {figures}")

    lines = sweep(spec, log_file, samples_dir, resume=resume, purge=purge_cache_between_runs, progress=report)
    skipped = len(spec["experiments"]) - len(lines)
    failed = sum(bool(line["error"]) for line in lines)
    typer.echo(f"{len(lines) - failed} runs, {failed} failed, {skipped} skipped, logged in {log_file}")
    if failed:
        raise typer.Exit(1)
