"""Passages of real text that every Python carries: documentation strings of the standard library."""

import ast
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dejakv.errors import DatasetError

WORDS = (60, 110)
"""Least and most words of a passage."""
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "turtledemo", "ensurepip"}


@dataclass(frozen=True)
class Passage:
    """`name`: the object it documents, unique among passages."""

    name: str
    text: str


@cache
def standard_library() -> tuple[Passage, ...]:
    """Documentation of modules, classes and functions as running text, by name. It depends on the Python version.

    Raises: DatasetError where the standard library is installed without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, Passage] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if not _SKIPPED.isdisjoint(parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue  # a template or a file for another version
        module = ".".join(part for part in parts if part != "__init__")
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = " ".join((ast.get_docstring(node) or "").split())
                name = module if isinstance(node, ast.Module) else f"{module}.{node.name}"
                if WORDS[0] <= len(text.split()) <= WORDS[1] and ">>>" not in text:
                    found.setdefault(name, Passage(name, text))
    if not found:
        raise DatasetError(f"{root} holds no Python sources: install the standard library with its .py files")
    return tuple(found.values())
