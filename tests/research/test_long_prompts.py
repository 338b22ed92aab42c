"""`python -m research.long_prompts`: every step at two lengths, and how it grows."""

import json
from pathlib import Path

import pytest

from research import long_prompts


def test_long_prompts_measures_each_step_at_each_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long_prompts.main(["--tokens", "500,1000", "--times", "1", "--json", str(tmp_path / "figures.json")])
    printed = capsys.readouterr().out
    sizes = json.loads((tmp_path / "figures.json").read_text())["tokens"]
    assert set(sizes) == {"500", "1000"}
    for name, row in sizes["1000"].items():
        assert row["ms"]["p50"] > 0, name
        assert f"| {name} |" in printed
