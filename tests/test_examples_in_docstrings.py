"""Examples in docstrings show what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
MODULES = sorted(
    str(path.relative_to(SOURCE).with_suffix("")).replace("/", ".").removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if ">>>" in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert found.attempted, "no example is found: it is outside a docstring"
    assert not found.failed
