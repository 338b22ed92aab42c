"""The `dejakv` command."""

import sys
from typing import Annotated

import typer

from dejakv.cli.explain import explain_command
from dejakv.cli.frontier import frontier_command
from dejakv.cli.models import models_app
from dejakv.cli.run import run_command
from dejakv.cli.serve import serve_command
from dejakv.cli.sweep import sweep_command
from dejakv.errors import DejaKVError

typer_app = typer.Typer(
    name="dejakv",
    help="Reuse what a language model already computed for a similar prompt, and prove what that saved and cost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_OPTIONS = {"token_normalize_func": lambda name: name.replace("_", "-")}
typer_app.command("run", context_settings=_OPTIONS)(run_command)
typer_app.command("sweep", context_settings=_OPTIONS)(sweep_command)
typer_app.command("serve", context_settings=_OPTIONS)(serve_command)
typer_app.command("explain", context_settings=_OPTIONS)(explain_command)
typer_app.command("frontier", context_settings=_OPTIONS)(frontier_command)
typer_app.add_typer(models_app, name="models")


def _version(wanted: bool) -> None:
    if wanted:
        version_command()
        raise typer.Exit


@typer_app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Reuse what a language model already computed for a similar prompt, and prove what that saved and cost."""


@typer_app.command("version")
def version_command() -> None:
    """Print the version."""
    from dejakv import __version__

    typer.echo(__version__)


def app() -> None:
    """Entry point: an error of the package is one line and exit code 2, not a traceback."""
    try:
        typer_app()
    except DejaKVError as error:
        typer.echo(f"dejakv: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    app()
