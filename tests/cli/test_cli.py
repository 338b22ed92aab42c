"""The command line as a user meets it."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dejakv
from dejakv.cli.main import app, typer_app

RUNNER = CliRunner()


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


def test_a_run_with_underscores_writes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["dejakv", "run", "--max_samples", "8", "--arms", "none,cache", "--output", str(tmp_path), "--log_samples"]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit) as done:
        app()
    assert done.value.code == 0
    said = capsys.readouterr()
    assert "Answers as in full computation" in said.out
    assert "latency=" in said.err
    assert json.loads((tmp_path / "summary.json").read_text())["samples"] == 8
