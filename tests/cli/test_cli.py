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


def test_version() -> None:
    for arguments in (["--version"],):
        done = RUNNER.invoke(typer_app, arguments)
        assert done.exit_code == 0
        assert done.output.strip() == version("dejakv") == dejakv.__version__


def test_models_lists_the_bundled_ones() -> None:
    text = RUNNER.invoke(typer_app, ["models"]).output
    assert "shapes-vlm" in text
    assert "docs-lm" in text


def test_models_lists_the_models_that_can_be_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEJAKV_MODELS_DIR", str(tmp_path))
    text = RUNNER.invoke(typer_app, ["models", "list"]).output
    assert "bundled" in text
    assert "not fetched" in text
    assert "dejakv models get smollm2-135m" in text


def test_getting_an_unknown_model_is_one_line() -> None:
    done = command("models", "get", "nope")
    assert done.returncode == 2
    assert done.stderr.startswith("dejakv: no model 'nope' can be fetched: choose smollm2-135m")


def test_a_run_with_underscores_writes_its_files(tmp_path: Path) -> None:
    done = command("run", "--max_samples", "8", "--arms", "none,cache", "--output", str(tmp_path), "--log_samples")
    assert done.returncode == 0, done.stderr
    assert "answers that equal full computation's" in done.stdout
    assert "latency=" in done.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["samples"] == 8


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--preset", "nope"], "choose one of shapes"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--dataset", "nope", "--model", "docs-lm"], "unknown data set"),
        (["--similarity-threshold", "2"], "-1 to 1"),
        (["--embedding-layer", "prompt"], "NAME:DIM"),
        (
            ["--embedding-layer", "prompt:7:0.5", "--embedding-layer", "vision:auto:0.5", "--max-samples", "2"],
            "prompt:192",
        ),
        (["--embedding-hook", "no.such:hook"], "does not import"),
        (["--temperature", "-1"], "give 0 or more"),
        (["--output", "/proc/nowhere", "--max-samples", "2"], "--output"),
        (["--arms", "none,all"], "none, prefix, cache"),
        (["--cache-mode", "maybe"], "live, dry-run, off"),
        (["--encoder-threads", "-1"], "encoder_threads=-1 is negative"),
    ],
)
def test_bad_flags_are_one_line_that_names_the_remedy(arguments: list[str], says: str) -> None:
    done = command("run", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_serving_strangers_needs_keys() -> None:
    done = command("serve", "--host", "0.0.0.0")
    assert done.returncode == 2
    assert "--api-keys-file" in done.stderr


def test_a_model_folder_without_config(tmp_path: Path) -> None:
    done = command("run", "--model", str(tmp_path))
    assert done.returncode == 2
    assert "config.json" in done.stderr


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "dejakv", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, dejakv.__version__)


def test_a_run_with_lifetimes_and_quotas(tmp_path: Path) -> None:
    """What is stored may be used for so long, by the partitions that have a part."""
    result = RUNNER.invoke(
        typer_app,
        ["run", "--preset", "docs", "--max-samples", "2", "--ttl", "0.000001", "--ttl-rows", "5", "--partitions", "2",
         "--quotas", "default=1000000000", "--repeat", "2", "--output", str(tmp_path / "out")],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    kept = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert (kept["cache.ttl"], kept["cache.ttl_rows"], kept["cache.partitions"]) == (0.000001, 5, 2)
    assert kept["cache.quotas"] == ["default=1000000000"]
    rows = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert {row["arms"]["cache"]["method"] for row in rows} == {"none"}, "all has expired"
    bad = RUNNER.invoke(typer_app, ["run", "--preset", "docs", "--quotas", "default"])
    assert bad.exit_code != 0
