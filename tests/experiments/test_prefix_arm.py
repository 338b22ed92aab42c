"""The arm `prefix`: what a prefix cache in blocks of 16 tokens reuses, in any dtype, as `estimate` says beforehand; results name the dtype."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest

from dejakv.experiments.estimate import estimate
from dejakv.experiments.reports.report import make_report
from dejakv.experiments.reports.why import decision_sentences, explain_sample
from dejakv.experiments.run import run
from dejakv.experiments.settings import settings_from
from dejakv.experiments.sweep import sweep
from dejakv.experiments.sweep_log import sheet
from dejakv.experiments.table import show, show_result

WORDS = "river ferry town hill noon bridge rain market garden letter window harbour music stone".split()


TOO_SHORT = "the stored prefix is shorter than a prefill unit of 256 tokens"


def sentence(words: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words))


def chats() -> list[str]:
    """Prompts that begin alike for some tokens or many, one that comes again, one that goes on, one of its own."""
    common, long = sentence(40, 1), sentence(330, 2)
    return [
        f"{common} {sentence(20, 3)}", f"{common} {sentence(25, 4)}", f"{common} {sentence(20, 3)}",
        f"{sentence(9, 6)}", f"{sentence(9, 6)} {sentence(4, 7)}",
        f"{long} {sentence(9, 8)}", f"{long} {sentence(30, 9)}", sentence(60, 10),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in chats()))
    return path


def measured(log: Path, dtype: str, **run_part: Any) -> Any:
    given = {"model": "docs-lm", "dataset": "log", "dataset_path": str(log), "raw_prompts": True}
    return run(settings_from(None, {**given, "dtype": dtype, "max_new_tokens": 2, **run_part}, {}))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_reuses_the_prefixes_that_estimate_counts(log: Path, dtype: str) -> None:
    expected = estimate(log, "docs-lm", raw_prompts=True)["tokens_prefix"]
    result = measured(log, dtype)
    arm = result.summary["arms"]["prefix"]
    assert arm["prompt_tokens"] - arm["computed_tokens"] == expected > 0
    reused = [row.arms["prefix"].record.reused_tokens for row in result.rows]
    assert all(tokens % 16 == 0 for tokens in reused)
    assert 0 < min(filter(None, reused)) < 256 < max(reused)
    records = [row.arms["prefix"].record for row in result.rows]
    assert not any(record.bitwise for record in records if record.reused_tokens)
    assert result.summary["dtype"] == dtype


def test_a_prefix_that_is_too_short_for_low_precision_is_named(log: Path) -> None:
    """Each miss behind a stored prefix says why, also in the summary; in fp32 none is too short."""
    result = measured(log, "bf16", arms=("prefix", "cache"))
    rows = result.rows
    behind = [row for row in rows if row.arms["prefix"].record.reused_tokens]
    missed = [row.arms["cache"].record for row in behind if row.arms["cache"].record.method == "none"]
    assert len(missed) == len(behind) - 1 > 0  # the long one reuses a prefill unit
    assert all("shorter than a prefill unit of 256 tokens" in record.reason for record in missed)
    assert {record.reason for record in missed} <= set(result.summary["not_used"])
    exact = [row.arms["cache"].record for row in measured(log, "fp32", arms=("cache",)).rows]
    assert not any("shorter than a prefill unit" in record.reason for record in exact)
    assert exact[0].reason == "no stored prompt begins like this one"


def test_the_dtype_stands_in_each_result(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In what a run prints, short and whole, in the page of its report, in a sweep's log and table, and where a miss is explained."""
    given = {
        "model": "docs-lm",
        "dataset": "log",
        "dataset_path": str(log),
        "raw_prompts": True,
        "max_new_tokens": 1,
        "max_samples": 3,
    }
    for dtype in ("bf16", "fp32"):
        result = run(settings_from(None, {**given, "dtype": dtype, "output": str(tmp_path / dtype)}, {}))
        for shown in (show, show_result):
            shown(result.summary, result.rows)
            assert f"docs-lm in {dtype}" in capsys.readouterr().out
        make_report([tmp_path / dtype], tmp_path / f"{dtype}.html")
        assert f"docs-lm in {dtype}" in (tmp_path / f"{dtype}.html").read_text()

    specs = {"defaults": {"preset": "docs", "max_samples": 2}, "grid": {"dtype": ["bf16", "fp32"]}}
    lines = sweep(specs, tmp_path / "sweep.csv")
    with (tmp_path / "sweep.csv").open(newline="") as file:
        assert [line["dtype"] for line in csv.DictReader(file)] == ["bf16", "fp32"]
    assert [row[1] for row in sheet(lines).rows] == ["bf16", "fp32"]


def test_a_miss_in_low_precision_is_explained(log: Path, tmp_path: Path) -> None:
    result = measured(log, "bf16", arms=("none", "cache"), output=str(tmp_path / "run"))
    for row, reason in zip(result.rows[:2], ("no stored prompt begins like this one", TOO_SHORT), strict=True):
        found = explain_sample(tmp_path / "run", row.sample_id)
        assert found.reason == row.arms["cache"].record.reason
        assert f"why not more: {reason}" in "\n".join(decision_sentences(found))
