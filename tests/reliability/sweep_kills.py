"""Sweeps of tiny experiments that are killed and resumed, for the tests beside it."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from dejakv.experiments.sweep_log import logged


def spec_of(experiments: int) -> str:
    """A grid of runs that look one prompt up and answer nothing."""
    seeds = ", ".join(map(str, range(experiments)))
    return (
        "defaults: {model: docs-lm, dataset: docs, max_samples: 1, cache_mode: dry-run}\n"
        f"grid: {{name: 'seed-{{seed}}', seed: [{seeds}]}}\n"
    )


def started(folder: Path, log: str) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "dejakv", "sweep", "--specs", "spec.yaml", "--log-file", log]
    resume = ["--resume"] if (folder / log).exists() else []
    return subprocess.Popen([*line, *resume], cwd=folder, stdout=subprocess.DEVNULL, start_new_session=True)


def killed_and_resumed(folder: Path, kills: int, dice: random.Random) -> int:
    """Runs the sweep, killing it after a random number of new rows each time, until it ends. Returns the kills that hit."""
    hits = 0
    for _ in range(kills):
        process = started(folder, "killed.csv")
        rows = len(logged(folder / "killed.csv")) if (folder / "killed.csv").exists() else 0
        wanted = rows + dice.randint(1, 8)
        while process.poll() is None and _rows(folder) < wanted:
            time.sleep(0.01)
        time.sleep(dice.random() / 20)  # anywhere in an experiment, or in the writing of its row
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            hits += 1
        process.wait()
    assert started(folder, "killed.csv").wait() == 0
    return hits


def _rows(folder: Path) -> int:
    try:
        return (folder / "killed.csv").read_bytes().count(b"\nseed-")
    except FileNotFoundError:
        return 0
