"""The examples run, and show what they claim."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart() -> None:
    lines = run("quickstart.py").splitlines()
    assert lines[1].startswith("miss: ")
    assert lines[2].startswith("hit (text:exact): 1 of ") or lines[2].startswith("hit (prefix): 1 of ")


def test_own_pipeline() -> None:
    text = run("own_pipeline.py")
    assert "hit (same_words)" in text
    assert "40 lookups" in text
