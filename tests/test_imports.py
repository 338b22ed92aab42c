"""Imports point one way: a package knows those below it. Read from the source, so that an import inside a function counts too."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "dejakv"
ARCHITECTURE = Path(__file__).parents[1] / "ARCHITECTURE.md"

KNOWS_NOT = {
    "config.py": ("decide", "store.store", "engines", "blend.blend", "experiments", "server", "cli"),
    "store": ("decide", "engines", "blend", "experiments", "server", "cli", "datasets", "models"),
    "encoder_cache": ("decide", "engines", "blend", "experiments", "server", "cli"),
    "vectors": ("datasets", "decide", "engines", "blend", "experiments", "server", "cli"),
    "decide/levels": ("engines", "blend", "experiments", "server", "cli"),
    "decide/guards": ("engines", "blend", "experiments", "server", "cli"),
    "trust": ("decide", "engines", "blend", "experiments", "server", "cli"),
    "decide": ("engines.transformers", "engines.vllm", "engines.open", "blend", "experiments", "server", "cli"),
    "blend": ("engines.transformers", "engines.vllm", "engines.open", "experiments", "server", "cli", "decide"),
    "engines": ("pipeline", "attachment", "experiments", "server", "cli"),
    "datasets": ("decide", "engines", "blend", "experiments", "server", "cli"),
    "models": ("decide", "engines", "blend", "experiments", "server", "cli"),
    "experiments": ("server", "cli"),
    "server": ("experiments", "cli"),
    "verify": ("decide", "engines", "blend", "store", "models", "experiments", "server", "cli"),
}
"""Packages, and the packages above them or beside them."""

WITHOUT_TORCH = ("config.py", "decide", "store", "encoder_cache", "trust", "verify")


def imports_of(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files_of(package: str) -> list[Path]:
    """A package's files, or the module itself."""
    found = SOURCE / package
    return [found] if found.suffix else list(found.rglob("*.py"))


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@pytest.mark.parametrize("package", KNOWS_NOT)
def test_a_package_knows_those_below_it_alone(package: str) -> None:
    files = files_of(package)
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
        for file in files_of(package)
        for module in imports_of(file)
        if within(module, "torch") or within(module, "transformers")
    ]
    assert not heavy


def test_nothing_imports_the_prototypes_but_the_registry_by_name() -> None:
    """Whatever stands outside of `prototypes` works without it; public names of `dejakv` are resolved on first use."""
    typed_names = SOURCE / "__init__.py"
    outside = [file for file in SOURCE.rglob("*.py") if SOURCE / "prototypes" not in file.parents]
    importing = [file for file in outside if any(within(name, "dejakv.prototypes") for name in imports_of(file))]
    assert importing == [typed_names]

    tree = ast.parse(typed_names.read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(checked.test) == "TYPE_CHECKING"
    at_runtime = ast.unparse([node for node in tree.body if node is not checked])  # type: ignore[arg-type]
    assert "import dejakv.prototypes" not in at_runtime
    assert "from dejakv.prototypes" not in at_runtime


def packages_imported(package: str) -> str:
    """The packages that a package imports, as the last column of ARCHITECTURE's table says."""
    files = SOURCE.glob("*.py") if package == "*.py" else (SOURCE / package).rglob("*.py")
    folders = {folder.name for folder in SOURCE.iterdir() if folder.is_dir()} - {package}
    parts = [module.split(".") for file in files for module in imports_of(file) if within(module, "dejakv")]
    return ", ".join(f"`{name}`" for name in sorted({part[1] for part in parts if len(part) > 1} & folders))


def with_imports(text: str) -> str:
    """ARCHITECTURE.md with the last column of the table of packages made anew."""
    return re.sub(
        r"^(\| `([a-z_]+|\*\.py)` \| [^|]+ \|)[^|]*\|$",
        lambda row: f"{row[1]} {packages_imported(row[2]) or 'none'} |",
        text,
        flags=re.MULTILINE,
    )


def test_architecture_names_all_packages_and_their_imports() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([a-z_]+)` \| [^|]+ \| [^|]* \|$", text, re.MULTILINE))
    assert {folder.name for folder in SOURCE.iterdir() if (folder / "__init__.py").exists()} <= named
    assert text == with_imports(text), "python -m tests.test_imports"


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {
        ".".join(("dejakv", *file.relative_to(SOURCE).with_suffix("").parts)): file for file in SOURCE.rglob("*.py")
    }
    graph = {name: {other for other in imports_of(file) if other in names} - {name} for name, file in names.items()}
    while leaves := [name for name, known in graph.items() if not known]:
        for name in leaves:
            del graph[name]
        for known in graph.values():
            known.difference_update(leaves)
    assert not graph, "these import each other, or modules that do"


if __name__ == "__main__":
    ARCHITECTURE.write_text(with_imports(ARCHITECTURE.read_text(encoding="utf-8")), encoding="utf-8")
