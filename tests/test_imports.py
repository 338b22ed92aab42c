"""Imports point one way: a package knows those below it. Read from the source, so that an import inside a function counts too."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "dejakv"

KNOWS_NOT = {
    "config": ("find", "levels", "guards", "store", "engines", "reuse.blend", "experiments", "server", "cli"),
    "store": ("find", "levels", "guards", "engines", "reuse", "experiments", "server", "cli", "datasets", "models"),
    "encoder_cache": ("find", "levels", "guards", "engines", "reuse", "experiments", "server", "cli"),
    "index": ("find", "levels", "guards", "engines", "reuse", "experiments", "server", "cli"),
    "encoders": ("find", "levels", "guards", "reuse", "experiments", "server", "cli"),
    "levels": ("find", "engines", "reuse", "experiments", "server", "cli"),
    "guards": ("find", "engines", "reuse", "experiments", "server", "cli"),
    "trust": ("find", "levels", "guards", "engines", "reuse", "experiments", "server", "cli"),
    "find": ("engines.transformers", "engines.vllm", "engines.open", "reuse", "experiments", "server", "cli"),
    "reuse": ("engines.transformers", "engines.vllm", "engines.open", "experiments", "server", "cli", "find"),
    "engines": ("pipeline", "attach", "experiments", "server", "cli"),
    "datasets": ("find", "engines", "reuse", "experiments", "server", "cli"),
    "models": ("find", "engines", "reuse", "experiments", "server", "cli"),
    "experiments": ("server", "cli"),
    "server": ("experiments", "cli"),
}
"""Packages, and the packages above them or beside them."""

WITHOUT_TORCH = ("config", "find", "levels", "guards", "index", "store", "encoder_cache", "trust")


def imports_of(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@pytest.mark.parametrize("package", KNOWS_NOT)
def test_a_package_knows_those_below_it_alone(package: str) -> None:
    files = list((SOURCE / package).rglob("*.py"))
    assert files
    upward = [
        f"{file.relative_to(SOURCE)} imports {module}"
        for file in files
        for module in imports_of(file)
        for above in KNOWS_NOT[package]
        if within(module, f"dejakv.{above}")
    ]
    assert not upward


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_the_core_knows_no_torch(package: str) -> None:
    heavy = [
        f"{file.relative_to(SOURCE)} imports {module}"
        for file in (SOURCE / package).rglob("*.py")
        for module in imports_of(file)
        if within(module, "torch") or within(module, "transformers")
    ]
    assert not heavy
