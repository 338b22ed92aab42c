"""Prompts that document the objects of a Python package, one after the other, as RepoAgent does.

A prompt has the project's tree, the code, its callees, its callers, and the instruction (Luo et
al., 2024, arXiv 2402.16667). The callees of an object are documented before it. So the code of an
object repeats in the prompts of its callers, at another position each time: little of it is a
prefix. Source is read with `ast`, never imported, never run.
"""

import ast
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dejakv.datasets.base import Sample
from dejakv.errors import DatasetError

_TESTS = {"test", "tests", "testing", "idle_test"}


@dataclass(frozen=True)
class CodeObject:
    """Class or function of a package.

    Attributes
    ----------
    name : str
        Unique in its package: `module.Class` or `module.function`, with the module's path inside
        the package.
    kind : str
        `class` or `function`.
    file : str
        Path inside the package, with forward slashes.
    code : str
        Its source, with decorators.
    doc : str
        Its docstring.
    calls : frozenset[str]
        Names that its code calls, as written (`wrap` of both `wrap(x)` and `text.wrap(x)`).
    """

    name: str
    kind: str
    file: str
    code: str
    doc: str
    calls: frozenset[str]

    @property
    def short(self) -> str:
        """Last part of the name."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class SourcePackage:
    """A package's name, its source files, and its classes and functions in the order of lines."""

    name: str
    files: tuple[str, ...]
    objects: tuple[CodeObject, ...]


def read_package(name_or_folder: str) -> SourcePackage:
    """Read a package by its importable name (`email`, `xml.dom`), its folder or its .py file.

    Folders of tests, and files that this Python cannot parse, are left out. Methods of classes at
    the top of a module count as functions, and nested functions do not.

    Raises
    ------
    DatasetError
        For a package that is not installed, or has no Python source.
    """
    root = _folder(name_or_folder)
    base = root.parent if root.is_file() else root
    every = [root] if root.is_file() else sorted(root.rglob("*.py"))
    paths = [path for path in every if not _TESTS & set(path.relative_to(base).parts[:-1])]
    objects: list[CodeObject] = []
    for path in paths:
        objects += _objects(path, path.relative_to(base).as_posix())
    if not objects:
        raise DatasetError(
            f"{name_or_folder!r} has no Python source with classes or functions in {str(root)!r}:"
            " name a package that is written in Python (email, asyncio), or a folder of .py files"
        )

    files = tuple(path.relative_to(base).as_posix() for path in paths)
    return SourcePackage(root.stem if root.is_file() else root.name, files, tuple(objects))


def _folder(name: str) -> Path:
    source_path = Path(name).expanduser()
    if source_path.is_dir() or (source_path.suffix == ".py" and source_path.is_file()):
        return source_path.resolve()
    if not all(part.isidentifier() for part in name.split(".")):
        raise DatasetError(
            f"no folder {name!r}, and not a valid name of a package: give an installed package or a"
            " folder"
        )
    search, spec = list(sys.path), None

    # Only by the path finder, which imports no code of the package.
    for number, part in enumerate(name.split(".")):
        builtin = number == 0 and part in sys.builtin_module_names
        spec = None if builtin else importlib.machinery.PathFinder.find_spec(part, search)
        if spec is None:
            why = "is built into the interpreter" if builtin else "is not installed"
            raise DatasetError(
                f"the package {name!r} {why}: --dataset-path takes an installed package or a folder"
            )
        search = list(spec.submodule_search_locations or [])

    assert spec is not None
    location = search[0] if search else spec.origin or ""
    if search or location.endswith(".py"):
        return Path(location)

    raise DatasetError(
        f"the package {name!r} has no Python source ({spec.origin}): name one that is written in"
        " Python"
    )


def _objects(path: Path, file: str) -> Iterator[CodeObject]:
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (
        SyntaxError,
        ValueError,
    ):
        # Packages also contain templates and files of other Python versions.
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

    called = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
    calls = {each.id for each in called if isinstance(each, ast.Name)}
    calls |= {each.attr for each in called if isinstance(each, ast.Attribute)}

    # A node's line is that of `def`; decorators stand above it.
    first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
    yield CodeObject(
        name=f"{owner}.{node.name}",
        kind="class" if isinstance(node, ast.ClassDef) else "function",
        file=file,
        code="".join(lines[first - 1 : node.end_lineno]).rstrip(),
        doc=ast.get_docstring(node) or "",
        calls=frozenset(calls),
    )


DEFAULT_PACKAGE = "email"
MAX_PROMPT_CHARACTERS = 6_900
"""Longest prompt: at most 2,000 tokens of SmolLM2's tokenizer.

The instruction and the chat template are part of these.
"""

MIN_PROMPT_CHARACTERS = 2_500
"""Shortest prompt: about 600 tokens. Objects with less context are skipped."""

CODE, REFERENCE, TREE = 3_000, 1_600, 30
"""Limits: characters of the object's code, characters of another object's, files in the tree."""

INSTRUCTION = (
    "Write the documentation of this object for a beginner. State in one sentence what it is for."
    " Then list its parameters with their meaning, describe step by step what the code does, and"
    " name what the reader must take care of. Use plain English, no headings, and nothing that is"
    " not in the code."
)


class RepoDataset:
    """One sample for each object of a package whose prompt has `MIN_PROMPT_CHARACTERS`.

    Parameters
    ----------
    path : str, optional
        An installed package or a folder, by default `email`.
    seed : int
        Chooses the first file.

    Raises
    ------
    DatasetError
        For a package that is not installed or has no source, and on iteration for one in which no
        object has a prompt that is long enough.
    """

    def __init__(self, path: str | None = None, seed: int = 0) -> None:
        self.package: SourcePackage = read_package(path or DEFAULT_PACKAGE)
        self.seed = seed

    def __iter__(self) -> Iterator[Sample]:
        sample_count = 0
        for item in self._order:
            context = self._context(item)
            if len(context) + len(INSTRUCTION) < MIN_PROMPT_CHARACTERS:
                continue
            fields = {"file": item.file, "object": item.name, "kind": item.kind}
            yield Sample(
                f"repo-{sample_count}",
                f"{INSTRUCTION}\nThe object: {item.name}.",
                context=context,
                fields=fields,
            )
            sample_count += 1

        if not sample_count:
            raise DatasetError(
                f"no object of {self.package.name!r} makes a prompt of {MIN_PROMPT_CHARACTERS}"
                " characters: name a larger package"
            )

    def _context(self, item: CodeObject) -> str:
        parts = [
            (
                f"You document the Python project {self.package.name}. Its files, the object's own"
                " marked with *:"
            ),
            *self._tree(item.file),
            f"\nThe object is the {item.kind} {item.name} of {item.file}:\n{cut(item.code, CODE)}",
        ]
        room = MAX_PROMPT_CHARACTERS - len(INSTRUCTION) - sum(len(part) + 1 for part in parts)

        # Callees first: a reader of the code needs them more than its callers.
        for title, related_objects in (
            ("It calls:", self._callees[item.name]),
            ("It is called by:", self._callers[item.name]),
        ):
            for number, related in enumerate(related_objects):
                head = f"\n{title}\n" if number == 0 else "\n"
                part = (
                    f"{head}{related.kind} {related.name} of"
                    f" {related.file}:\n{cut(related.code, REFERENCE)}"
                )
                # No half object: the next title may have a shorter one.
                if len(part) + 1 > room:
                    break
                room -= len(part) + 1
                parts.append(part)

        return "\n".join(parts)

    def _tree(self, file: str) -> list[str]:
        files = self.package.files
        # Of a large project only the folder of the file, and the top-level files.
        if len(files) > TREE:
            beside = file.rpartition("/")[0]
            files = tuple(f for f in files if "/" not in f or f.rpartition("/")[0] == beside)
            first = max(0, min(files.index(file) - TREE // 2, len(files) - TREE))
            files = files[first : first + TREE]
        return [f"* {name}" if name == file else f"  {name}" for name in files]

    @cached_property
    def _callees(self) -> dict[str, list[CodeObject]]:
        by_short: dict[str, list[CodeObject]] = {}
        for item in self.package.objects:
            by_short.setdefault(item.short, []).append(item)
        return {
            item.name: [
                _nearest(item, by_short[called])
                for called in sorted(item.calls)
                if called in by_short and called != item.short
            ]
            for item in self.package.objects
        }

    @cached_property
    def _callers(self) -> dict[str, list[CodeObject]]:
        callers: dict[str, list[CodeObject]] = {item.name: [] for item in self.package.objects}
        for item in self.package.objects:
            for callee in self._callees[item.name]:
                # A class does not call its own methods.
                if not callee.name.startswith(f"{item.name}."):
                    callers[callee.name].append(item)
        return callers

    @cached_property
    def _order(self) -> Sequence[CodeObject]:
        """Objects, callees before their callers; files in order, starting with the seed's."""
        objects_by_name = {item.name: item for item in self.package.objects}
        files = sorted({item.file for item in self.package.objects})
        first = self.seed % len(files)
        rank = {file: (number - first) % len(files) for number, file in enumerate(files)}

        order: dict[str, CodeObject] = {}
        open_now: set[str] = set()
        for root in sorted(objects_by_name.values(), key=lambda item: rank[item.file]):
            # No recursion: a chain of calls may be longer than Python's stack.
            stack = [root]
            while stack:
                item = stack[-1]
                waiting = [
                    o
                    for o in self._callees[item.name]
                    if o.name not in order and o.name not in open_now
                ]
                # Seen before, and nothing left to wait for: it is placed, or closes a cycle.
                if item.name in order or (item.name in open_now and not waiting):
                    order.setdefault(item.name, stack.pop())
                    continue
                open_now.add(item.name)
                stack += reversed(waiting)

        return tuple(order.values())


def _nearest(caller: CodeObject, candidates: Sequence[CodeObject]) -> CodeObject:
    """Return the best of several objects with the called name.

    It is the one in the caller's class, else in its file, else the first.
    """
    owner = caller.name.rpartition(".")[0]
    ranks = [
        0 if each.name.startswith(f"{owner}.") else 1 + (each.file != caller.file)
        for each in candidates
    ]
    return candidates[ranks.index(min(ranks))]


def cut(text: str, limit: int) -> str:
    """Return the text, or its first whole lines within `limit` characters and a line `...`."""
    if len(text) <= limit:
        return text
    return text[:limit].rpartition("\n")[0] + "\n    ..."
