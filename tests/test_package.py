"""What importing the package costs, and that every public name is there."""

import subprocess
import sys

import pytest

import dejakv


def test_importing_is_light() -> None:
    """No framework, and no other module of ours."""
    heavy = "('torch', 'transformers', 'fastapi', 'faiss', 'numpy', 'pydantic')"
    code = f"import sys, dejakv; print(sorted(m for m in sys.modules if m in {heavy} or m.startswith('dejakv.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", [name for name in dejakv.__all__ if not name.startswith("_")])
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(dejakv, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = dejakv.nothing_of_the_kind  # type: ignore[attr-defined]
