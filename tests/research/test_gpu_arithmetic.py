"""`python -m research.gpu --arithmetic`: milliseconds from counts, each assumption beside them."""

import json
from pathlib import Path

import pytest
from research.gpu.__main__ import main


def test_a_prompt_costs_what_its_shape_and_the_counts_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--arithmetic", "--model", "llama-3.1-8b", "--tokens", "5000", "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())
    model = figures["models"]["llama-3.1-8b"]
    # 2 x 6.98e9 x 5,000 operations, and 4 x 32 x 4,096 x 5,000 x 2,500 of attention, at half of 989e12 a second.
    assert model["full prefill"] == pytest.approx(154.4, abs=0.1)
    # 5 pieces of 128 MiB, 32 launches each, and 16 beside them: 6 microseconds each.
    assert model["exact hit, engine loop"] == pytest.approx((5 * 32 + 16) * 0.006)
    assert model["blend"] == pytest.approx(sum(value for name, value in model.items() if name.startswith("blend, ")))
    out = capsys.readouterr().out
    assert all(name in out for name in figures["assumptions"])
    assert "nothing here was measured on a GPU" in out
