"""Names say what a thing is: the share of vague ones stays small, and no module of the core brings them back in number."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "dejakv"
VAGUE = frozenset(
    "found told held kept one other others there gone said heard most least some made given at own left here away within what "
    "which known asked wanted taken theirs mine these those their".split()
)
"""Words that name nothing: each stood for things of many types."""


def bindings_of(source: str) -> Iterator[str]:
    """Yield each name that a parameter, an assignment or a loop gives to a thing."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield from (parameter.arg for parameter in parameters if parameter.arg not in ("self", "cls"))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def vague_names(source: str) -> list[str]:
    return [name for name in bindings_of(source) if name.lstrip("_") in VAGUE]


def test_vague_names_are_told_from_others() -> None:
    source = "def f(found, donor):\n    for one in donor:\n        held = [other for other in one]\n    return held\n"
    assert sorted(vague_names(source)) == ["found", "held", "one", "other"]


@pytest.mark.parametrize("package", ["", "decide", "store", "engines", "blend", "trust", "experiments", "server"])
def test_names_at_most_one_in_a_hundred_is_vague(package: str) -> None:
    sources = [path.read_text() for path in (SOURCE / package).rglob("*.py")]
    vague = [name for source in sources for name in vague_names(source)]
    total = sum(len(list(bindings_of(source))) for source in sources)
    assert total > 200
    assert len(vague) <= total / 100, sorted(set(vague))
