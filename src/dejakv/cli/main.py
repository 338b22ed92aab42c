"""The `dejakv` command."""

import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from dejakv.cli.cache import cache_app
from dejakv.cli.explain import explain_command
from dejakv.cli.frontier import frontier_command
from dejakv.cli.models import models_app
from dejakv.cli.replay import make_trace_command, replay_command
from dejakv.cli.report import report_command
from dejakv.cli.run import run_command
from dejakv.cli.serve import serve_command
from dejakv.cli.sim_llm import sim_llm_command
from dejakv.cli.sweep import sweep_command
from dejakv.cli.tune import tune_command
from dejakv.errors import ConfigError, DejaKVError, OutputError


class _Interrupted(Exception):
    """Ctrl-C in a command. typer would turn a KeyboardInterrupt into an exit without a word."""


_REMOVED = {
    "attack": "its checks are tests now (tests/attacks in the source), and docs/exactness.md says what was attacked",
}
"""Commands of earlier versions, and what took their place."""


class _Commands(TyperGroup):
    """The commands, with an interrupt that typer passes on."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command of a line. Raises: ConfigError for a removed one."""
        if args and args[0] in _REMOVED:
            raise ConfigError(f"there is no command {args[0]!r} any more: {_REMOVED[args[0]]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Runs the command. Raises: _Interrupted."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise _Interrupted from interrupt


typer_app = typer.Typer(
    name="dejakv",
    cls=_Commands,
    help="Reuse what a language model already computed for a similar prompt, and prove what that saved and cost.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
_OPTIONS = {"token_normalize_func": lambda name: name.replace("_", "-")}
typer_app.command("run", context_settings=_OPTIONS)(run_command)
typer_app.command("sweep", context_settings=_OPTIONS)(sweep_command)
typer_app.command("serve", context_settings=_OPTIONS)(serve_command)
typer_app.command("explain", context_settings=_OPTIONS)(explain_command)
typer_app.command("frontier", context_settings=_OPTIONS)(frontier_command)
typer_app.command("replay", context_settings=_OPTIONS)(replay_command)
typer_app.command("tune", context_settings=_OPTIONS)(tune_command)
typer_app.command("report", context_settings=_OPTIONS)(report_command)
typer_app.command("make-trace", context_settings=_OPTIONS)(make_trace_command)
typer_app.command("sim-llm", context_settings=_OPTIONS)(sim_llm_command)
typer_app.add_typer(models_app, name="models")
typer_app.add_typer(cache_app, name="cache")


# click's UsageError. typer does not export it, and later releases of typer bundle click.
_UsageError: Any = typer.BadParameter.__mro__[1]


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
    """Entry point: an error is one line on standard error, not a traceback, and exit code 2, or 1 for files that cannot be written."""
    try:
        status = typer_app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except OutputError as error:
        _fail(str(error), 1)
    except DejaKVError as error:
        _fail(str(error))
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "dejakv"
        _fail(f"{error.format_message().rstrip('.')}; see {command} --help")
    except (typer.Abort, _Interrupted):
        _fail("stopped", 130)
    else:
        sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str, status: int = 2) -> NoReturn:
    typer.echo("dejakv: " + " ".join(message.split()), err=True)
    sys.exit(status)


if __name__ == "__main__":
    app()
