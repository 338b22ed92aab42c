"""`dejakv replay` and `dejakv make-trace` as a user meets them."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from dejakv.cli.main import app


def said(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    monkeypatch.setattr(sys, "argv", ["dejakv", *shlex.split(line)])
    with pytest.raises(SystemExit) as ended:
        app()
    told = capsys.readouterr()
    return ended.value.code, told.out, told.err


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


def test_a_trace_is_made_and_replayed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said("make-trace t.jsonl --requests 300", monkeypatch, capsys)[0] == 0
    code, out, err = said("replay t.jsonl --budget 5% --budget 100000 --output new", monkeypatch, capsys)
    assert err == "replaying 300 requests\n"
    assert code == 0
    assert "comes nearest to Belady's" in out
    assert json.loads((here / "new" / "replay.json").read_text())["requests"] == 300


def test_a_log_of_prompts_is_replayed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = said("replay log.jsonl --budget 1000 --model docs-lm", monkeypatch, capsys)
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
        ("make-trace log.jsonl", "exists and is not overwritten"),
        ("make-trace new.jsonl --requests 0", "--requests"),
    ],
)
def test_mistakes(
    here: Path, line: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    code, _, error = said(line, monkeypatch, capsys)
    assert code == 2
    assert says in error
    assert len(error.splitlines()) == 1
    assert before == {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
