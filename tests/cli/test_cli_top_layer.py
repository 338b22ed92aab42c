"""`dejakv run --reuse top_layer`: hits in the report, ordinary models refused, and their study labelled."""

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dejakv.cli.main import typer_app
from dejakv.datasets.base import Sample
from dejakv_models.docs import edit, make_document

STREAM = ["--dataset", "tests.cli.test_cli_top_layer:stream", "--chunk-source", "prompt", "--max-new-tokens", "4"]
COSTS = ["--costs", "1e-4,0,0,0"]


def stream(**_options: object) -> list[Sample]:
    """A document, and then questions about it with an edit."""
    rng = random.Random(5)
    document = make_document(rng, facts=12)
    changes = [edit(document, rng, facts=1, questions=1) for _ in range(2)]
    edited = [
        Sample(f"edit-{i}", one.questions[0].text, one.questions[0].answer, context=one.target.text)
        for i, one in enumerate(changes)
    ]
    return [Sample("document", changes[0].questions[0].text, context=document.text), *edited]


def run(*arguments: str, folder: Path | None = None) -> tuple[int, str]:
    output = ["--output", str(folder)] if folder is not None else []
    done = CliRunner().invoke(typer_app, ["run", *STREAM, *COSTS, *arguments, *output], catch_exceptions=True)
    return done.exit_code, done.output + (str(done.exception) if done.exception else "")


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_run_reports_its_hits_as_ones_that_may_change_answers(tmp_path: Path) -> None:
    code, text = run("--model", "docs-lckv", "--reuse", "top_layer", folder=tmp_path)
    assert code == 0, text
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["by_method"]["top_layer"] == 2
    assert summary["by_level"]["copied"]["judged"] == 2
    assert summary["arms"]["cache"]["accuracy"] == summary["arms"]["none"]["accuracy"] == 1.0
    assert summary["top1"] is not None
    for row in rows_of(tmp_path)[1:]:
        record = row["arms"]["cache"]
        assert (record["method"], record["approximate"], record["stored"]) == ("top_layer", True, False)
    why = CliRunner().invoke(typer_app, ["explain", "edit-0", "--run", str(tmp_path)])
    assert why.exit_code == 0, why.output
    told = " ".join(why.output.split())
    assert "plan: top_layer, 66 of 114 tokens computed, from 1 donor (document)" in told
    assert "exact prefix 0.0061 s, top layer 0.0032 s" in told


def test_a_dry_run_plans_it(tmp_path: Path) -> None:
    code, text = run("--model", "docs-lckv", "--reuse", "top_layer", "--cache-mode", "dry-run", folder=tmp_path)
    assert code == 0, text
    assert [row["plan"] for row in rows_of(tmp_path)] == ["full", "top layer", "top layer"]


@pytest.mark.parametrize("mode", ["live", "dry-run"])
def test_an_ordinary_model_is_refused_with_the_reason(mode: str) -> None:
    code, text = run("--model", "docs-lm", "--reuse", "top_layer", "--cache-mode", mode)
    assert code != 0
    assert "every layer attends to its own KV" in text
