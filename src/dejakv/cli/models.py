"""`dejakv models`: the checkpoints that ship with the package."""

import typer


def models_command() -> None:
    """List the bundled models, what they are and how large."""
    from rich.console import Console
    from rich.table import Table

    from dejakv.models import available

    table = Table()
    for name in ("name", "what it is", "size"):
        table.add_column(name)
    for model in available():
        table.add_row(model.name, model.about, f"{model.nbytes / 1e6:.1f} MB")
    Console().print(table)
    typer.echo("use: dejakv run --model NAME, or dejakv.models.load(NAME)")
