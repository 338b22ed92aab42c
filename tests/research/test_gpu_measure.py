"""`python -m research.gpu`: a small run on the CPU goes to its end, and says that it is one."""

import json
from pathlib import Path

import pytest
import torch
from research.gpu.__main__ import main
from tests.services import python


def test_a_small_run_checks_measures_and_writes_a_page(tmp_path: Path) -> None:
    # In a process of its own, since it puts names of vLLM into place.
    run = python("-m", "research.gpu", "--device", "cpu", "--tiny", "--seconds", "3000", "--output", tmp_path)
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert sum(saw.startswith("right") for saw in result["checks"].values()) == 3
    (left_out,) = result["left_out"]
    assert left_out.startswith("the part with vLLM: this environment has none")
    assert left_out in (tmp_path / "page.md").read_text()
    (first_tokens,) = (rows for heading, rows in result["figures"].items() if heading.startswith("Time"))
    assert [row["way"] for row in first_tokens] == ["full prefill", "prefix cache", "exact hit", "blend"]
    assert [row["computed"] for row in first_tokens[:3]] == [400, 1, 1]
    assert 0 < first_tokens[3]["computed"] < 200
    assert "nothing here was measured on a GPU" in (tmp_path / "page.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_run_and_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path)]) == 2
    assert "there is no GPU here" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
