"""The default corpus: documentation of Python's standard library, and questions generated from it by a rule."""

import ast
import textwrap
from collections.abc import Iterator

from dejakv.datasets.rag_corpus import Corpus, Passage, Question
from dejakv.datasets.repo import cut
from dejakv.datasets.source_code import CodeObject, read_package

MODULES = (
    "argparse", "asyncio", "calendar", "collections", "csv", "datetime", "difflib", "email", "fractions", "functools",
    "heapq", "http", "inspect", "json", "logging", "pathlib", "random", "shutil", "statistics", "string", "subprocess",
    "tarfile", "tempfile", "textwrap", "threading", "typing", "unittest", "urllib", "xml", "zipfile",
)  # fmt: skip
LEAST, MOST = 150, 1_100
"""Characters of a documentation string: shorter ones say little, longer ones are cut."""


def docs_corpus() -> Corpus:
    """One passage for each documented class and function. Every answer is in the passage that its question is about."""
    passages: list[Passage] = []
    questions: list[Question] = []
    for module in MODULES:
        for item in read_package(module).objects:
            if len(item.doc) < LEAST or item.short.startswith("_"):
                continue
            name = _public(module, item)
            defaults = dict(_defaults(item))
            signature = ", ".join(f"{p}={v}" if v else p for p, v in defaults.items())
            head = f"{name}({signature})" if item.kind == "function" else f"class {name}"
            passages.append(Passage(name, f"{head}, {item.kind} of the module {module}\n{cut(item.doc, MOST)}"))
            questions += _questions(module, name, item, defaults)
    return Corpus(tuple(passages), tuple(questions))


def _questions(module: str, name: str, item: CodeObject, defaults: dict[str, str]) -> Iterator[Question]:
    first = " ".join(item.doc.split()).partition(". ")[0]
    yield Question(f'Which {item.kind} does this describe: "{first[:160]}"?', name, module)
    for parameter, value in defaults.items():
        if value:
            asked = f"What is the default value of the parameter {parameter} of {name}?"
            yield Question(asked, value, module)


def _public(module: str, item: CodeObject) -> str:
    """`textwrap.wrap` of a module's own file, `asyncio.tasks.gather` of a package's."""
    return item.name if item.name.startswith(f"{module}.") else f"{module}.{item.name}"


def _defaults(item: CodeObject) -> Iterator[tuple[str, str]]:
    """Each parameter with its default as written; an empty text if it has none or a long one."""
    (node,) = ast.parse(textwrap.dedent(item.code)).body
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    plain = [*node.args.posonlyargs, *node.args.args]
    missing: list[ast.expr | None] = [None] * (len(plain) - len(node.args.defaults))
    given = [*missing, *node.args.defaults, *node.args.kw_defaults]
    for argument, default in zip([*plain, *node.args.kwonlyargs], given, strict=True):
        text = ast.unparse(default) if default is not None else ""
        if argument.arg not in ("self", "cls"):
            yield argument.arg, text if len(text) <= 20 else ""
