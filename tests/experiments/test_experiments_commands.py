"""The command of a run's settings can be typed."""

import json
import shlex
from typing import Any

import pytest
import typer

from dejakv.cli.main import typer_app
from dejakv.experiments.settings import RunSettings, run_command_of, settings_from

NAMED: dict[str, Any] = json.loads(json.dumps(RunSettings().named(), default=str))


def _flags() -> set[str]:
    command: Any = typer.main.get_command(typer_app)
    return {flag for option in command.get_command(None, "run").params for flag in option.opts}


def _other(value: object) -> object:
    """A value that is not this one."""
    return not value if isinstance(value, bool) else ["x"] if isinstance(value, list) else "x"


@pytest.mark.parametrize("name", NAMED)
def test_a_setting_is_given_by_a_flag_of_the_command(name: str) -> None:
    words = shlex.split(run_command_of({name: _other(NAMED[name])}))[4:]
    assert {word for word in words if word.startswith("--")} <= _flags()


def test_the_encoder_s_threads_are_given_again() -> None:
    settings = settings_from(None, {}, {"index_encoder": "model", "encoder_threads": 2})
    assert "--encoder-threads 2" in run_command_of(settings.named())
