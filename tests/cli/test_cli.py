"""The command line as a user meets it."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dejakv
from dejakv.cli.main import typer_app

RUNNER = CliRunner()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "dejakv.cli.main", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("module", ["dejakv", "dejakv.cli.main"])
def test_version(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == version("dejakv") == dejakv.__version__


def test_models_lists_the_models_that_can_be_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEJAKV_MODELS_DIR", str(tmp_path))
    text = RUNNER.invoke(typer_app, ["models", "list"]).output
    assert "bundled" in text
    assert "not fetched" in text
    assert "dejakv models get smollm2-135m" in text


def test_a_run_with_underscores_writes_its_files(tmp_path: Path) -> None:
    done = command("run", "--max_samples", "8", "--arms", "none,cache", "--output", str(tmp_path), "--log_samples")
    assert done.returncode == 0, done.stderr
    assert "Answers as in full computation" in done.stdout
    assert "latency=" in done.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["samples"] == 8
