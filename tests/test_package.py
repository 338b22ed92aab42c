"""What importing the package costs, and that every public name is there."""

import subprocess
import sys
import time

import pytest

import dejakv


def test_importing_is_light() -> None:
    code = "import sys, dejakv; print(sorted(m for m in ('torch','transformers','fastapi','faiss','numpy') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_import_time_is_far_below_the_budget() -> None:
    """0.3 s is the budget (issue of the main job); ten times that is no flake of a busy machine."""
    best = min(_seconds() for _ in range(3))
    assert best < 3.0


def _seconds() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import dejakv"], check=True)
    return time.perf_counter() - began


@pytest.mark.parametrize("name", [name for name in dejakv.__all__ if not name.startswith("_")])
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(dejakv, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = dejakv.nothing_of_the_kind  # type: ignore[attr-defined]
