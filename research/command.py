"""A function with typer's annotations as the command of `python -m research.NAME`."""

import sys
from collections.abc import Callable
from typing import Any

import typer

from dejakv.errors import DejaKVError


def app_of(function: Callable[..., Any]) -> typer.Typer:
    """Return a command line of one command, with hyphens in its options."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings={"token_normalize_func": lambda name: name.replace("_", "-")})(
        function
    )
    return app


def run(function: Callable[..., Any]) -> None:
    """Run the command on this process's arguments.

    An error of dejakv is one line and exit code 2.
    """
    try:
        app_of(function)()
    except DejaKVError as error:
        typer.echo(f"{' '.join(str(error).split())}", err=True)
        sys.exit(2)
