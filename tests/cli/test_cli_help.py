"""The help texts of all commands: complete, and true about the defaults that they name."""

import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dejakv.cli.main import typer_app
from dejakv.server.settings import ServerSettings

COMMAND: Any = typer.main.get_command(typer_app)
COMMANDS = (
    "run",
    "sweep",
    "serve",
    "explain",
    "frontier",
    "replay",
    "make-trace",
    "tune",
    "report",
    "sim-llm",
)
UNITS = {"MiB": 1024**2, "GiB": 1024**3}


def helps(name: str) -> dict[str, str]:
    """Help texts of a command's options, by parameter."""
    return {option.name: option.help or "" for option in COMMAND.commands[name].params}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_text(name: str) -> None:
    assert not [option for option, text in helps(name).items() if not text]


@pytest.mark.parametrize("name", COMMANDS)
def test_no_help_text_loses_words_to_markup(name: str) -> None:
    """Rich takes words in square brackets for markup and drops them."""
    lost = [option for option, text in helps(name).items() if re.search(r"\[(?!:THRESH)", text)]
    assert not lost


def test_the_help_of_serve_names_the_defaults_of_its_settings() -> None:
    named = {option: re.search(r"\(default: (.+?)\)", text) for option, text in helps("serve").items()}
    told = {option: found[1] for option, found in named.items() if found}
    assert len(told) >= 8
    for option, text in told.items():
        number, _, unit = text.partition(" ")
        default = ServerSettings.model_fields[option].default
        assert (str(int(number) * UNITS[unit]) if unit else text) == str(default), option


def test_the_options_of_run_are_in_groups() -> None:
    text = CliRunner().invoke(typer_app, ["run", "--help"]).output
    for panel in ("Model", "Data set", "Reuse", "Finding a donor", "Blend", "Storage", "Run", "Output"):
        assert f"─ {panel} ─" in text


def test_run_and_serve_have_the_same_options_of_keeping() -> None:
    both = {"ttl", "ttl_prompts", "ttl_rows", "ttl_encoder", "quotas"}
    for option in both:
        assert helps("run")[option] == helps("serve")[option]
