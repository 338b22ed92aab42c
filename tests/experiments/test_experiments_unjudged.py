"""No false hits are reported where nothing was judged, and a dry run says what it judges by."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dejakv.experiments.run import run
from dejakv.experiments.settings import settings_from
from dejakv.experiments.sweep import sweep
from dejakv.experiments.table import show


@pytest.fixture
def questions(tmp_path: Path) -> dict[str, Any]:
    """One question three times, without an answer to judge by."""
    (tmp_path / "q.jsonl").write_text('{"question": "Where does Ann live?"}\n' * 3)
    given = {"model": "docs-lm", "dataset": "jsonl", "dataset_path": str(tmp_path / "q.jsonl"), "max_new_tokens": 1}
    return {**given, "prompt_template": "<s> Ann lives in Paris. <q> {question} <a>"}


def shown(summary: dict[str, Any]) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    show(summary, console=console)
    return console.export_text()


def row_of(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.strip("│ ").startswith(name))
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_a_dry_run_without_answers(questions: dict[str, Any]) -> None:
    summary = run(settings_from(None, {**questions, "cache_mode": "dry-run"}, {})).summary
    assert (summary["judged"], summary["false_hits"], summary["false_hit_rate"]) == (0, None, None)
    assert row_of(shown(summary), "exact_text") == ["exact_text", "2", "0", "-", "-", "-"]
    assert "no hit was judged" in shown(summary)


def test_a_run_without_the_arm_that_judges(questions: dict[str, Any]) -> None:
    summary = run(settings_from(None, {**questions, "arms": ("cache",)}, {})).summary
    assert row_of(shown(summary), "exact_text") == ["exact_text", "2", "2", "-", "-"]


def test_the_log_of_a_sweep(questions: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    spec = {"experiments": [{**questions, "name": "a", "arms": ["cache"]}]}
    sweep(spec, log)
    (row,) = csv.DictReader(io.StringIO(log.read_text()))
    assert (row["judged_hits"], row["false_hits"]) == ("0", "")


def test_a_dry_run_says_what_it_judges_by() -> None:
    summary = run(settings_from("shapes", {"max_samples": 30, "cache_mode": "dry-run"}, {})).summary
    assert summary["judged"] > 0
    assert "judged by the data set's answers" in shown(summary)
    assert sum(summary["not_used"].values()) > 0
    assert "found and not used" in shown(summary)
