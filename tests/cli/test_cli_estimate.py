"""`dejakv estimate` as a user meets it."""

import json
import sys
from pathlib import Path

import pytest

from dejakv.cli.main import app


def test_a_log_is_estimated_and_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{name} lives in Paris."}) + "\n" for name in "abca")
    )
    line = ["dejakv", "estimate", "log.jsonl", "--model", "docs-lm", "--output", "new"]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit) as ended:
        app()
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert "4 requests of log.jsonl (JSON lines)" in out
    assert "elsewhere in earlier prompts" in out
    assert "prove it: dejakv run --model docs-lm --dataset log" in out
    written = (tmp_path / "new" / "estimate.json").read_bytes()
    with pytest.raises(SystemExit) as ended:
        app()
    assert ended.value.code == 2
    assert "exists and is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "new" / "estimate.json").read_bytes() == written
