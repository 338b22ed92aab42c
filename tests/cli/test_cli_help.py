"""The help texts of all commands: as in tests/cli/golden, short, complete with `--help-all`, and true about the defaults that they name."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dejakv.cli.main import COMMANDS, REMOVED, typer_app
from dejakv.cli.options import size
from dejakv.experiments.settings import CACHE_KINDS, RUN_KINDS, SINGULARS, SWITCHES, RunSettings
from dejakv.server.settings import ServerSettings

GROUP: Any = typer.main.get_command(typer_app)
GOLDEN = Path(__file__).parent / "golden"


def options(name: str) -> list[Any]:
    return GROUP.get_command(None, name).params


def plain(name: str, *more: str) -> str:
    """A command's sentence, and its visible arguments and options by group."""
    command = GROUP.get_command(None, name)
    for sub in more:
        command = command.commands[sub]
    lines = [" ".join((command.help or "").split())]
    for one in command.params:
        if not getattr(one, "hidden", False) and one.name != "help":
            panel = getattr(one, "rich_help_panel", None) or "Options"
            lines.append(f"{panel}: {', '.join(one.opts)}: {one.help}")
    lines += [f"Commands: {sub}" for sub, each in getattr(command, "commands", {}).items() if not each.hidden]
    return "\n".join(lines) + "\n"


PAGES = [
    *((name,) for name in COMMANDS),
    ("cache", "show"),
    ("cache", "purge"),
    ("cache", "partitions"),
    ("models", "get"),
]


@pytest.mark.parametrize("page", PAGES, ids=["-".join(page) for page in PAGES])
def test_the_help_is_the_golden_one(page: tuple[str, ...]) -> None:
    """`python -m tests.cli.golden` writes them anew."""
    assert plain(*page) == (GOLDEN / f"help-{'-'.join(page)}.txt").read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_ends_with_a_line_to_begin_with(name: str) -> None:
    command = GROUP.get_command(None, name)
    program, called, *arguments = shlex.split(command.epilog.removeprefix("Example: "))
    assert (program, called) == ("dejakv", name)
    command.make_context(name, arguments, resilient_parsing=True)
    known = {option for each in command.params for option in each.opts}
    assert {word for word in arguments if word.startswith("--")} <= known


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_text_and_loses_no_words_to_markup(name: str) -> None:
    """Rich takes words in square brackets for markup and drops them."""
    for option in options(name):
        assert getattr(option, "help", ""), option.name
        assert not re.search(r"\[(?!:THRESHOLD)", option.help), option.name


@pytest.mark.parametrize("name", ["run", "serve", "estimate", "explain", "sweep"])
def test_help_is_short_and_the_rest_is_in_help_all(name: str) -> None:
    assert len([option for option in options(name) if not getattr(option, "hidden", False)]) <= 25
    if name in ("run", "serve"):
        text = CliRunner().invoke(typer_app, [name, "--help-all"], env={"COLUMNS": "200"}).output
        for option in options(name):
            assert option.opts[0] in text


@pytest.mark.parametrize(("name", "settings"), [("run", RunSettings()), ("serve", ServerSettings())])
def test_the_help_names_the_defaults_of_the_settings(name: str, settings: Any) -> None:
    told = {option.name: re.search(r"\(default: (\S+( [MG]iB)?)\)\.$", option.help) for option in options(name)}
    known = {option: found[1] for option, found in told.items() if found and hasattr(settings, option)}
    assert len(known) >= 8
    for option, text in known.items():
        default = getattr(settings, option)
        if default is not None:  # None has a sentence for what it means
            assert text == size(",".join(default) if isinstance(default, tuple) else default), option


def test_every_setting_is_an_option_of_run_or_is_given_with_set() -> None:
    named = {SWITCHES.get(option.name, SINGULARS.get(option.name, option.name)) for option in options("run")}
    assert {*CACHE_KINDS, *RUN_KINDS} - named == {"free_order"}


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_command_names_what_took_its_place(name: str) -> None:
    done = CliRunner().invoke(typer_app, [name])
    assert f"there is no command {name!r} any more" in str(done.exception)


def test_set_a_file_and_options_override_each_other_in_this_order(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("preset: docs\nblend.share: 0.5\nkeep.ttl: 60\nmax-samples: 1\n")
    line = [
        "run",
        "--config",
        str(tmp_path / "settings.yaml"),
        "--set",
        "blend.share=.2",
        "--set",
        "max_samples=3",
        "--max-samples",
        "2",
    ]
    done = CliRunner().invoke(typer_app, [*line, "--cache-mode", "dry-run", "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.exception
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["samples"] == 2
