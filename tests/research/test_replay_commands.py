"""`python -m research.replay` and `research.replay.generate` as a user meets them."""

import json
import shlex
from pathlib import Path

import pytest
from research.command import app_of
from research.replay.__main__ import replay_trace
from research.replay.generate import write_generated
from typer.testing import CliRunner


def said(line: str) -> tuple[int, str, str]:
    name, *arguments = shlex.split(line)
    done = CliRunner().invoke(app_of({"replay": replay_trace, "generate": write_generated}[name]), arguments)
    error = f"{done.stderr}{done.exception}" if done.exit_code == 1 else done.stderr
    return done.exit_code, done.stdout, error


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps({"prompt": "one and the same question " * 20}) + "\n" for _ in "ab")
    )
    (tmp_path / "stopped").mkdir()
    (tmp_path / "stopped" / "samples.jsonl").write_text("")
    (tmp_path / "stopped" / "settings.json").write_text('{"dejakv_version": "0.1.0"}')
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "replay.json").write_text("mine")
    return tmp_path


def test_a_trace_is_made_and_replayed(here: Path) -> None:
    assert said("generate t.jsonl --requests 300")[0] == 0
    code, out, err = said("replay t.jsonl --budget 5% --budget 100000 --output new")
    assert err == "replaying 300 requests\n"
    assert code == 0
    assert "comes nearest to Belady's" in out
    assert json.loads((here / "new" / "replay.json").read_text())["requests"] == 300


def test_a_log_of_prompts_is_replayed(here: Path) -> None:
    code, out, _ = said("replay log.jsonl --budget 1000 --model docs-lm")
    assert code == 0
    assert "blocks of 16" in out
    assert "the store's policies are equal" in out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("replay", "Missing argument"),
        ("replay missing.jsonl", "no file"),
        ("replay empty.jsonl", "has no requests"),
        ("replay stopped", "was stopped before its end"),
        ("replay .", "no summary.json of a run"),
        ("replay log.jsonl --block 16", "--block is for traces"),
        ("replay log.jsonl --budget ten --model docs-lm", "--budget 'ten'"),
        ("replay log.jsonl --output done", "exists and is not overwritten"),
        ("generate log.jsonl", "exists and is not overwritten"),
        ("generate new.jsonl --requests 0", "--requests"),
    ],
)
def test_mistakes(here: Path, line: str, says: str) -> None:
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    code, _, error = said(line)
    assert code != 0
    assert says in error
    assert before == {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
