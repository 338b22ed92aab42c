"""A sweep that is killed anywhere and resumed has exactly the rows of one that was not."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.services import Python

from dejakv.experiments.sweep import read_file, sweep
from dejakv.experiments.sweep_log import read_log


def spec_of(experiments: int) -> str:
    """A grid of runs that look one prompt up and answer nothing."""
    seeds = ", ".join(map(str, range(experiments)))
    return (
        "defaults: {model: docs-lm, dataset: docs, max_samples: 1, cache_mode: dry-run}\n"
        f"grid: {{name: 'seed-{{seed}}', seed: [{seeds}]}}\n"
    )


def started(folder: Path, log: str) -> Python:
    line = ["-m", "dejakv", "sweep", "--specs", "spec.yaml", "--log-file", log]
    resume = ["--resume"] if (folder / log).exists() else []
    return Python(*line, *resume, cwd=folder)


def killed_and_resumed(folder: Path, kills: int, dice: random.Random) -> int:
    """Runs the sweep, killing it after a random number of new rows each time, until it ends. Returns the kills that hit."""
    hits = 0
    for _ in range(kills):
        process = started(folder, "killed.csv")
        rows = len(read_log(folder / "killed.csv")) if (folder / "killed.csv").exists() else 0
        wanted = rows + dice.randint(1, 8)
        while process.poll() is None and _rows(folder) < wanted:
            time.sleep(0.01)
        time.sleep(dice.random() / 20)  # anywhere in an experiment, or in the writing of its row
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            hits += 1
        process.wait()
    if not hits:  # a busy machine: all was done before anybody looked
        (folder / "killed.csv").unlink()
        return killed_and_resumed(folder, kills, dice)
    assert started(folder, "killed.csv").wait() == 0
    return hits


def _rows(folder: Path) -> int:
    try:
        return (folder / "killed.csv").read_bytes().count(b"\nseed-")
    except FileNotFoundError:
        return 0


DICE = random.Random(int(os.environ.get("DEJAKV_SOAK_SEED", "17")))


@pytest.mark.parametrize(
    ("experiments", "kills"), [(12, 1), pytest.param(200, 12, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_each_row_is_there_exactly_once(tmp_path: Path, experiments: int, kills: int) -> None:
    (tmp_path / "spec.yaml").write_text(spec_of(experiments))
    assert killed_and_resumed(tmp_path, kills, DICE) > 0
    sweep(read_file(tmp_path / "spec.yaml", "--specs"), tmp_path / "whole.csv")
    whole = sorted(read_log(tmp_path / "whole.csv"), key=lambda line: line["name"])
    assert len(whole) == experiments
    assert sorted(read_log(tmp_path / "killed.csv"), key=lambda line: line["name"]) == whole
