"""`dejakv run` where its output folder has a run already: nothing that was measured is lost, and nothing is measured twice."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dejakv.cli.main import typer_app
from dejakv.errors import ConfigError

QUESTIONS = ("Where does Ann live?", "Where does Bob live?")


def run_in(folder: Path, *flags: str) -> Result:
    """Runs two questions of a file beside the output folder."""
    data = folder.parent / "log.jsonl"
    if not data.exists():
        data.write_text("".join(json.dumps({"question": text}) + "\n" for text in QUESTIONS))
    given = ["run", "--model", "docs-lm", "--dataset", "jsonl", "--dataset-path", str(data), "--arms", "none,cache"]
    return CliRunner().invoke(typer_app, [*given, "--max-new-tokens", "2", "--output", str(folder), *flags])


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("once") / "out"
    done = run_in(folder)
    assert done.exit_code == 0, done.output
    return folder, done


@pytest.fixture
def finished(once: tuple[Path, Result]) -> Path:
    """The folder of a finished run, as it was."""
    kept = once[0].parent / "kept"
    if not kept.exists():
        shutil.copytree(once[0], kept)
    shutil.rmtree(once[0])
    shutil.copytree(kept, once[0])
    return once[0]


def refused(folder: Path, *flags: str) -> str:
    """What a run says that changes no file."""
    before = files(folder)
    done = run_in(folder, *flags)
    assert isinstance(done.exception, ConfigError), done.output
    assert files(folder) == before
    return str(done.exception)


@pytest.mark.parametrize("flags", [(), ("--resume",)])
def test_a_finished_run_is_reported_again_and_not_measured_again(
    once: tuple[Path, Result], finished: Path, flags: tuple[str, ...]
) -> None:
    before = files(finished)
    again = run_in(finished, *flags)
    assert again.exit_code == 0, again.output
    assert files(finished) == before
    assert again.stdout == once[1].stdout
    assert "finished" in again.stderr
    assert "loading" not in again.stderr


def test_a_run_over_other_data_is_kept(finished: Path) -> None:
    data = finished.parent / "log.jsonl"
    whole = data.read_text()
    try:
        data.write_text(whole.replace("Bob", "Eve"))
        assert "other samples" in refused(finished)
    finally:
        data.write_text(whole)


def test_a_stopped_run_is_kept_until_it_is_resumed(finished: Path) -> None:
    lines = (finished / "samples.jsonl").read_text().splitlines(keepends=True)
    (finished / "samples.jsonl").write_text(lines[0])
    (finished / "summary.json").unlink()
    assert "--resume" in refused(finished)
    done = run_in(finished, "--resume")
    assert done.exit_code == 0, done.output
    assert (finished / "samples.jsonl").read_text().splitlines(keepends=True)[0] == lines[0]
    assert json.loads((finished / "summary.json").read_text())["samples"] == 2


def test_a_run_that_was_stopped_before_its_first_sample_is_begun_anew(finished: Path) -> None:
    (finished / "samples.jsonl").write_text("")
    (finished / "summary.json").unlink()
    assert run_in(finished).exit_code == 0
    assert json.loads((finished / "summary.json").read_text())["samples"] == 2


def test_a_dry_run_measures_nothing_and_is_done_again(tmp_path: Path) -> None:
    assert run_in(tmp_path / "out", "--cache-mode", "dry-run").exit_code == 0
    assert run_in(tmp_path / "out", "--cache-mode", "dry-run", "--reuse", "adopt").exit_code == 0
    assert run_in(tmp_path / "out").exit_code == 0
