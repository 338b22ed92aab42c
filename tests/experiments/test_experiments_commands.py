"""The command of a run's settings can be typed, and means the same settings."""

import json
import shlex
from typing import Any

import pytest
import typer

from dejakv.cli.main import typer_app
from dejakv.cli.run import resolve_settings
from dejakv.experiments.settings import RunSettings, run_command_of, settings_from

NAMED: dict[str, Any] = json.loads(json.dumps(RunSettings().named(), default=str))
RUN: Any = typer.main.get_command(typer_app)


def _other(value: object) -> object:
    """A value that is not this one."""
    return not value if isinstance(value, bool) else ["x"] if isinstance(value, list) else "x"


@pytest.mark.parametrize("name", NAMED)
def test_a_setting_is_given_by_a_flag_of_the_command(name: str) -> None:
    words = shlex.split(run_command_of({name: _other(NAMED[name])}))[4:]
    flags = {flag for option in RUN.get_command(None, "run").params for flag in option.opts}
    assert {word for word in words if word.startswith("--")} <= flags


@pytest.mark.parametrize(
    ("run", "cache"),
    [
        (
            {"max_samples": 3, "arms": ("none", "cache")},
            {"reuse": "blend", "semantic_text": False, "second_sight": True},
        ),
        ({"dataset": "jsonl", "raw_prompts": True}, {"embedding_layers": ("prompt:auto:0.5", "own:4:1")}),
        ({}, {"reuse": "blend", "error_bound": 0.02, "differs": "kl:0.05", "trust_groups": ("a=b,c", "d=e")}),
        (
            {"dataset_path": "/tmp/my log"},
            {"index_encoder": "model", "encoder_threads": 2, "costs": (1e-4, 0.0, 0.0, 0.0)},
        ),
    ],
)
def test_a_command_gives_the_settings_again(run: dict[str, Any], cache: dict[str, Any]) -> None:
    settings = settings_from(None, {"model": "docs-lm", "dataset": "docs", **run}, cache)
    words = shlex.split(run_command_of(settings.named()))
    assert words[:2] == ["dejakv", "run"]
    context = RUN.get_command(None, "run").make_context("run", words[2:])
    options = {
        name: tuple(value.split(","))
        if name == "arms"
        else tuple(map(float, value.split(",")))
        if name == "costs"
        else value
        for name, value in context.params.items()
        if value not in (None, [], False) and name != "set_"
    }
    again = resolve_settings(None, options, context.params["set_"] or (), None)
    assert again.named() == {**settings.named(), "implied": again.implied}
