"""Shares in summaries: of a dry run without a model, of one with a model, of a live run, and of a log of one's own."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dejakv.cli.main import typer_app
from dejakv.errors import InputError, ModelError
from dejakv.experiments.run import run
from dejakv.experiments.settings import settings_from

PASSAGE = "Cats sleep for most of the day, see well at night, and are seldom found where they are looked for. " * 4


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine to which no model was fetched."""
    monkeypatch.setenv("DEJAKV_MODELS_DIR", str(tmp_path / "models"))
    return tmp_path


def log(file: Path, *records: dict[str, object]) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def test_a_log_of_ones_own_needs_no_model(no_model: Path) -> None:
    path = log(
        no_model / "log.jsonl",
        {"prompt": f"Read this. {PASSAGE} Where are cats?"},
        {"prompt": f"And now this, at another place. {PASSAGE} When do they see?"},
        {"messages": [{"role": "system", "content": PASSAGE}, {"role": "user", "content": "Why?"}]},
        {"question": "Something else?", "partition": "b"},
    )
    line = f"run --dataset jsonl --dataset-path {path} --cache-mode dry-run --output {no_model / 'out'}"
    done = CliRunner().invoke(typer_app, line.split())
    assert done.exception is None, done.exception
    assert "tokens of smollm2-135m's tokenizer" in done.output
    assert "WARNING" not in done.output
    summary = json.loads((no_model / "out" / "summary.json").read_text())
    assert summary["samples"] == 4
    assert summary["share_prefix"] < 0.3 < summary["share_anywhere"] < 0.7
    lines = [json.loads(line) for line in (no_model / "out" / "samples.jsonl").read_text().splitlines()]
    assert sum(line["anywhere"] for line in lines) == round(summary["share_anywhere"] * summary["prompt_tokens"])
    assert lines[-1]["anywhere"] == 0


@pytest.mark.parametrize("name", ["repo", "rag", "sessions"])
def test_every_workload_is_measured_by_its_name_alone(name: str, no_model: Path) -> None:
    arguments = ["run", "--dataset", name, "--cache-mode", "dry-run", "--max-samples", "12"]
    done = CliRunner().invoke(typer_app, arguments)
    assert done.exception is None, done.exception
    assert f"12 samples of {name}" in done.output
    assert "stood in the prefixes of earlier prompts" in done.output
    assert "dejakv models get smollm2-135m" in done.output  # for the levels, the model must be here


def test_dry_and_live_runs_have_the_shares_of_the_same_prompts() -> None:
    given = {"max_samples": 12, "arms": ("none", "cache")}
    live = run(settings_from("docs", given, {})).summary
    dry = run(settings_from("docs", {**given, "cache_mode": "dry-run"}, {})).summary
    assert 0 < live["share_prefix"] <= live["share_anywhere"] < 1
    assert [dry[key] for key in ("share_prefix", "share_anywhere")] == [live["share_prefix"], live["share_anywhere"]]


def test_pictures_need_a_model(no_model: Path) -> None:
    with pytest.raises(InputError, match="has pictures: name an image-text model"):
        run(settings_from(None, {"model": "smollm2-135m", "dataset": "shapes", "cache_mode": "dry-run"}, {}))


def test_a_live_run_without_the_model_names_the_command(no_model: Path) -> None:
    with pytest.raises(ModelError, match="dejakv models get smollm2-135m"):
        run(settings_from("rag", {"max_samples": 2}, {}))


def test_shares_are_counted_by_the_tokenizer_of_the_model_that_is_named(no_model: Path) -> None:
    path = log(no_model / "log.jsonl", {"prompt": PASSAGE}, {"prompt": PASSAGE})
    given = {"dataset": "jsonl", "dataset_path": path, "cache_mode": "shares"}
    tokens = {
        name: run(settings_from(None, {**given, "model": name}, {})).summary["prompt_tokens"]
        for name in ("docs-lm", "smollm2-135m")
    }
    assert tokens["docs-lm"] != tokens["smollm2-135m"]
    (no_model / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="has no tokenizer that can be loaded"):
        run(settings_from(None, {**given, "model": str(no_model)}, {}))
