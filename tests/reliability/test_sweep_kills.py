"""A sweep that is killed anywhere and resumed has exactly the rows of one that was not."""

import os
import random
import time
from pathlib import Path

import pytest
from tests.reliability.sweep_kills import killed_and_resumed, spec_of, started

from dejakv.experiments.sweep_log import logged

DICE = random.Random(int(os.environ.get("DEJAKV_SOAK_SEED", "17")))


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    ("experiments", "kills"), [(24, 2), pytest.param(200, 12, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_each_row_is_there_exactly_once(tmp_path: Path, experiments: int, kills: int, jobs: int) -> None:
    (tmp_path / "spec.yaml").write_text(spec_of(experiments))
    assert killed_and_resumed(tmp_path, jobs, kills, DICE) > 0
    assert started(tmp_path, "whole.csv", 1).wait() == 0
    whole = sorted(logged(tmp_path / "whole.csv"), key=lambda line: line["name"])
    assert len(whole) == experiments
    assert sorted(logged(tmp_path / "killed.csv"), key=lambda line: line["name"]) == whole


def test_the_processes_of_a_killed_sweep_end(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(spec_of(100))
    process = started(tmp_path, "log.csv", 2)
    while not (tmp_path / "log.csv").exists():
        assert process.poll() is None
        time.sleep(0.02)
    children = _children(process.pid)
    assert len(children) == 2
    process.kill()
    process.wait()
    for _ in range(3000):
        if not any(Path(f"/proc/{child}/cmdline").exists() and _is_worker(child) for child in children):
            return
        time.sleep(0.02)
    pytest.fail("a worker is still there a minute after its sweep was killed")


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    found = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [child for child in found if _is_worker(child)]


def _is_worker(pid: int) -> bool:
    try:
        return b"sweep-worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
