"""The `dejakv` command. A command's module is imported when the command is called."""

import re
import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from dejakv.errors import ConfigError, DejaKVError, OutputError, printable

COMMANDS = {
    "run": (
        "Ask many questions with and without the cache: hits, tokens saved, time to first token,"
        " answers changed."
    ),
    "sweep": "Run many experiments from one specification, or the ablation of every level.",
    "estimate": (
        "Tell from a log of prompts what reuse would save, and how often it would be wrong."
    ),
    "certify": (
        "Certify from a log which blends are wrong rarely enough, in a file for vLLM's connector."
    ),
    "explain": (
        "Explain why a sample of a run hit or missed, or what a running server reuses for a"
        " request."
    ),
    "report": (
        "Write one self-contained HTML page: tables, changed answers and the commands that made"
        " them."
    ),
    "verify": (
        "Prove or refute that the caches of a running server, of any engine, change no answer."
    ),
    "serve": "Serve a model over HTTP, with OpenAI's endpoints.",
    "stabilize": "Forward requests to any server, changed so that they keep their prefix.",
    "models": "List the models that dejakv knows by name, or fetch one.",
    "cache": "Look after the folder of a cache: show, purge, partitions, evidence.",
}
"""Commands with their line in `dejakv --help`; each module has its command's name."""

EXAMPLES = {
    "run": "dejakv run --preset repo --max-samples 20 --brief --output runs/first",
    "sweep": "dejakv sweep --specs experiments.yaml --log-file runs/sweep.csv",
    "estimate": "dejakv estimate sample",
    "certify": (
        "dejakv certify log.jsonl --model smollm2-135m --error-bound .05 --output certificate.json"
    ),
    "explain": "dejakv explain --server http://127.0.0.1:8000 request.json",
    "report": "dejakv report runs/first --output report.html",
    "verify": "dejakv verify http://127.0.0.1:8000 --output page.md",
    "serve": "dejakv serve --model smollm2-135m --store cache",
    "stabilize": "dejakv stabilize http://127.0.0.1:8000 --rules keys,tools,volatile --check",
    "models": "dejakv models get smollm2-135m",
    "cache": "dejakv cache show cache",
}
"""A line of each command, below its help."""

REMOVED = {
    "attack": (
        "its checks are tests now (tests/attacks in the source), and docs/explanation/exactness.md"
        " says what was attacked"
    ),
    "frontier": (
        "`python -m research.frontier` in a checkout of the source does it; its results are in"
        " docs/results"
    ),
    "make-trace": "`python -m research.replay.generate` in a checkout of the source does it",
    "replay": (
        "`python -m research.replay` in a checkout of the source does it; its results are in"
        " docs/results/replay.md"
    ),
    "sim-llm": "run examples/sim_llm.py, which has the same options",
    "tune": "give the log to `dejakv estimate LOG`",
    "version": "it is `dejakv --version`",
}
"""Commands of earlier versions, with their replacements."""

REMOVED_OPTIONS = {
    "--jobs": "give --ray, which runs as many experiments at once as the machine has cores",
    "--noise-floor": "compare two runs, with --dtype fp32 and --dtype bf16",
    "--prompts": "give the log itself: dejakv estimate LOG",
    "--seeds": "run a sweep with `grid: {seed: [0, 1, 2, 3, 4]}` (docs/how-to/measure.md)",
    "--show-disagreements": "`dejakv report` shows the changed answers of a run",
    "--svg": "`dejakv report` writes tables alone; the log of a sweep is a .csv file",
    "--unsound": "an ordinary model is refused; docs/results/sim_llm.md has what came out of it",
}
"""Options of earlier versions, with their replacements."""

_ADDRESS = re.compile(r"auto|local|(ray://)?[^\s/]+:\d+")
"""Address of a cluster of Ray."""
_OPTIONS: dict[str, Any] = {"token_normalize_func": lambda name: name.replace("_", "-")}


class _CommandInterrupted(Exception):
    """Ctrl-C in a command; typer would turn a KeyboardInterrupt into an exit without a word."""


class _CommandGroup(TyperGroup):
    """Commands by name, with an interrupt passed on by typer."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command, or take its line alone for the help.

        A ConfigError tells of a removed command.
        """
        if cmd_name in REMOVED:
            raise ConfigError(f"there is no command {cmd_name!r} any more: {REMOVED[cmd_name]}")
        if cmd_name not in COMMANDS:
            return None

        # Importing every command for one page of help would take seconds.
        if self._listing:
            return TyperCommand(cmd_name, help=COMMANDS[cmd_name])
        target = getattr(import_module(f"dejakv.cli.{cmd_name}"), f"{cmd_name}_command")

        # A module has one function, or a group of commands of its own.
        if not isinstance(target, typer.Typer):
            app = typer.Typer(add_completion=False)
            app.command(cmd_name, context_settings=_OPTIONS)(target)
            target = app

        click_command = typer.main.get_command(target)
        click_command.name = cmd_name
        click_command.epilog = f"Example: {EXAMPLES[cmd_name]}"
        return click_command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a `--ray` without an address the address `local`."""
        # typer has no option whose value may be left out, so it is written in.
        for place, after in enumerate([*args[1:], ""][: len(args)]):
            if args[place] == "--ray" and not _ADDRESS.fullmatch(after):
                args[place] = "--ray=local"
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help without importing any command."""
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an interrupt becomes `_CommandInterrupted`."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise _CommandInterrupted from interrupt


typer_app = typer.Typer(
    name="dejakv", cls=_CommandGroup, add_completion=False, pretty_exceptions_enable=False
)

# click's UsageError. typer does not export it, and later releases of typer bundle click.
_UsageError: Any = typer.BadParameter.__mro__[1]


def _version(enabled: bool) -> None:
    if enabled:
        from dejakv import __version__

        typer.echo(__version__)
        raise typer.Exit


@typer_app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Reuse what a language model already computed for a similar prompt, and prove what that saved
    and cost.
    """


def app() -> None:
    """Run the command line.

    An error is one line on standard error, not a traceback. The exit code is 2, or 1 for files that
    cannot be written, and 130 after an interrupt.
    """
    try:
        status = typer_app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except OutputError as error:
        _fail(str(error), 1)
    except DejaKVError as error:
        _fail(str(error))
    except _UsageError as error:
        from dejakv.config import REMOVED_SETTINGS

        # A mistake about an option names it; others have no such field.
        option = getattr(error, "option_name", None) or ""
        instead = REMOVED_OPTIONS.get(option) or REMOVED_SETTINGS.get(
            option.removeprefix("--").replace("-", "_")
        )
        if instead:
            _fail(f"there is no option {option} any more: {instead}")

        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "dejakv"
        _fail(f"{error.format_message().rstrip('.')}; see {command} --help")
    except (typer.Abort, _CommandInterrupted):
        _fail("stopped", 130)
    else:
        sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str, status: int = 2) -> NoReturn:
    typer.echo("dejakv: " + printable(" ".join(message.split())), err=True)
    sys.exit(status)


if __name__ == "__main__":
    app()
