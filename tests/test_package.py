"""What importing the package costs, and that every public name is there."""

import subprocess
import sys
from pkgutil import iter_modules

import pytest
from tests.services import python

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


def test_no_module_has_a_public_name() -> None:
    """Python binds an imported module in its package: it would take the place of the public name."""
    modules = {module.name for module in iter_modules(dejakv.__path__)}
    assert modules >= {"attachment", "pipeline", "engines"}
    assert not modules & set(dejakv.__all__)


@pytest.mark.parametrize("first", ["modules", "names"])
def test_public_names_stay_whatever_is_imported_first(first: str) -> None:
    steps = {
        "modules": "for home in {*dejakv._HOMES.values()}: import_module(home)",
        "names": "before = {name: getattr(dejakv, name) for name in dejakv.__all__}",
    }
    order = sorted(steps, key=lambda step: step != first)
    code = "\n".join([
        "import dejakv", "from importlib import import_module", "from types import ModuleType",
        *(steps[step] for step in order),
        "assert all(getattr(dejakv, name) is value for name, value in before.items())",
        "assert not any(isinstance(value, ModuleType) for value in before.values())",
        "print(dejakv.attach.__module__, callable(dejakv.attach))",
    ])  # fmt: skip
    done = python("-c", code)
    assert done.stdout.strip() == "dejakv.attachment True", done.stderr
