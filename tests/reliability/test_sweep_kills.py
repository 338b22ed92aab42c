"""A sweep that is killed anywhere and resumed has exactly the rows of one that was not."""

import os
import random
from pathlib import Path

import pytest
from tests.reliability.sweep_kills import killed_and_resumed, spec_of, started

from dejakv.experiments.sweep_log import logged

DICE = random.Random(int(os.environ.get("DEJAKV_SOAK_SEED", "17")))


@pytest.mark.parametrize(
    ("experiments", "kills"), [(12, 2), pytest.param(200, 12, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_each_row_is_there_exactly_once(tmp_path: Path, experiments: int, kills: int) -> None:
    (tmp_path / "spec.yaml").write_text(spec_of(experiments))
    assert killed_and_resumed(tmp_path, kills, DICE) > 0
    assert started(tmp_path, "whole.csv").wait() == 0
    whole = sorted(logged(tmp_path / "whole.csv"), key=lambda line: line["name"])
    assert len(whole) == experiments
    assert sorted(logged(tmp_path / "killed.csv"), key=lambda line: line["name"]) == whole
