"""Processes that share a store and are killed: nothing that was stored is lost, nothing is torn, nothing is left over."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import KILLS, SEED

PROGRAM = Path(__file__).with_name("crash_program.py")


def run(*options: object) -> dict[str, Any]:
    """The report of the program, which must have found no fault."""
    done = subprocess.run([sys.executable, PROGRAM, *map(str, options)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["faults"] == {}, f"{report}\n{done.stderr[-2000:]}"
    return report


@pytest.mark.parametrize("budget", [(), ("--budget",)], ids=["unlimited", "evicting"])
def test_kill_9_loses_tears_and_leaves_nothing(budget: tuple[str, ...]) -> None:
    report = run("--kills", 30, "--seed", 7, *budget)
    assert report["kills"] >= 30
    assert report["puts"] > 30
    assert report["read"] > 30


def test_four_processes_at_once_are_never_refused() -> None:
    report = run("--kills", 0, "--rounds", 1)
    assert report["puts"] > 50


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("budget", [(), ("--budget",)], ids=["unlimited", "evicting"])
def test_kill_9_for_long(budget: tuple[str, ...]) -> None:
    assert run("--kills", KILLS // 2, "--seed", SEED, *budget)["kills"] >= KILLS // 2
