"""The source of an installed Python package as objects that call each other: read with `ast`, never imported, never run."""

import ast
import importlib.machinery
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dejakv.errors import DatasetError

_TESTS = {"test", "tests", "testing", "idle_test"}


@dataclass(frozen=True)
class CodeObject:
    """A class or function of a package.

    name   unique in its package: `module.Class` or `module.function`, with the module's path inside the package
    kind   class or function
    file   path inside the package, with forward slashes
    calls  names that its code calls, as written (`wrap` of both `wrap(x)` and `text.wrap(x)`)
    """

    name: str
    kind: str
    file: str
    code: str
    doc: str
    calls: frozenset[str]

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Package:
    """A package's name, its source files in order, and its classes and functions in the order of files and lines."""

    name: str
    files: tuple[str, ...]
    objects: tuple[CodeObject, ...]


def read_package(name_or_folder: str) -> Package:
    """A package by its importable name (`email`, `xml.dom`) or by the folder of its source. Tests in it are left out.

    Raises: DatasetError for a package that is not installed, or has no Python source.
    """
    root = _folder(name_or_folder)
    paths = (
        [root] if root.is_file() else sorted(path for path in root.rglob("*.py") if not _TESTS & _parents(path, root))
    )
    base = root.parent if root.is_file() else root
    objects: list[CodeObject] = []
    for path in paths:
        objects += _objects(path, path.relative_to(base).as_posix())
    if not objects:
        raise DatasetError(
            f"{name_or_folder!r} has no Python source with classes or functions in {str(root)!r}: name a package that is "
            "written in Python (email, asyncio), or a folder of .py files"
        )
    files = tuple(path.relative_to(base).as_posix() for path in paths)
    return Package(root.stem if root.is_file() else root.name, files, tuple(objects))


def _parents(path: Path, root: Path) -> set[str]:
    return set(path.relative_to(root).parts[:-1])


def _folder(name: str) -> Path:
    given = Path(name).expanduser()
    if given.is_dir() or (given.suffix == ".py" and given.is_file()):
        return given.resolve()
    if not all(part.isidentifier() for part in name.split(".")):
        raise DatasetError(
            f"no folder {name!r}, and not a valid name of a package: give an installed package or a folder"
        )
    search, spec = list(sys.path), None
    for number, part in enumerate(name.split(".")):  # only by the path finder, which imports nothing
        builtin = number == 0 and part in sys.builtin_module_names
        spec = None if builtin else importlib.machinery.PathFinder.find_spec(part, search)
        if spec is None:
            why = "is built into the interpreter" if builtin else "is not installed"
            raise DatasetError(f"the package {name!r} {why}: --dataset-path takes an installed package or a folder")
        search = list(spec.submodule_search_locations or [])
    assert spec is not None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    if spec.origin and spec.origin.endswith(".py"):
        return Path(spec.origin)
    raise DatasetError(f"the package {name!r} has no Python source ({spec.origin}): name one that is written in Python")


def _objects(path: Path, file: str) -> Iterator[CodeObject]:
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (
        UnicodeDecodeError,
        SyntaxError,
        ValueError,
    ):  # packages also contain templates and files of other Python versions
        return
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    lines = text.splitlines(keepends=True)
    for node in tree.body:
        yield from _object(node, module, file, lines)
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                yield from _object(inner, f"{module}.{node.name}", file, lines)


def _object(node: ast.stmt, owner: str, file: str, lines: list[str]) -> Iterator[CodeObject]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    calls = (_called(call.func) for call in ast.walk(node) if isinstance(call, ast.Call))
    first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
    yield CodeObject(
        name=f"{owner}.{node.name}",
        kind="class" if isinstance(node, ast.ClassDef) else "function",
        file=file,
        code="".join(lines[first - 1 : node.end_lineno]).rstrip(),
        doc=ast.get_docstring(node) or "",
        calls=frozenset(name for name in calls if name),
    )


def _called(function: ast.expr) -> str:
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )
