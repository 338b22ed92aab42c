"""The Python page of the reference has every public name, and numpydoc finds their parameters and returns."""

import inspect
import pkgutil
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from numpydoc.docscrape import NumpyDocString
from numpydoc.validate import validate

import dejakv
from dejakv.settings import description

PAGE = (Path(__file__).parents[1] / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
NAMES = [name for name in re.findall(r"^::: (\S+)", PAGE, re.MULTILINE) if name != "dejakv.errors"]
FRAMEWORKS = {"dejakv.answers.langchain": "langchain_core", "dejakv.answers.litellm": "litellm"}
"""Modules that need another package, which is not everywhere."""
CHECKED = {"PR01", "PR02", "PR03", "PR04", "PR07", "RT01", "RT03", "YD01", "GL08"}
"""Parameters that are missing, unknown, in another order, without type or text; returns and yields that are missing or without text."""


def resolve(name: str) -> Any:
    return pkgutil.resolve_name(name)


def members(name: str) -> list[str]:
    """The name itself, and the public methods that its class defines."""
    value = resolve(name)
    if not inspect.isclass(value):
        return [name]
    methods = [
        each for each, member in vars(value).items() if not each.startswith("_") and callable(getattr(value, each))
    ]
    return [name, *(f"{name}.{each}" for each in methods if not inspect.isclass(vars(value)[each]))]


def test_the_page_has_every_public_name() -> None:
    on_page = {name.rpartition(".")[2] for name in NAMES}
    assert set(dejakv.__all__) - on_page == {"__version__", "DejaKVError"}


def problems_of(name: str) -> list[str]:
    """What numpydoc misses. A dataclass describes its fields as parameters or as attributes."""
    value = resolve(name)
    try:
        result = validate(name)
    except StopIteration:  # a method that a field replaces: numpydoc does not find its source
        return []
    # Fields are looked at below, and nobody calls a protocol.
    wanted = CHECKED - {"PR01"} if is_dataclass(value) or getattr(value, "_is_protocol", False) else CHECKED
    problems = [f"{name}: {code} {text}" for code, text in result["errors"] if code in wanted]
    if is_dataclass(value):
        text = NumpyDocString(inspect.getdoc(value) or "")
        described = {part for each in (*text["Parameters"], *text["Attributes"]) for part in each.name.split(", ")}
        # Settings have a text below each field, which the help of commands shows.
        described |= {item.name for item in fields(value) if description(value, item.name)}
        missing = [
            item.name for item in fields(value) if item.init and item.name[0] != "_" and item.name not in described
        ]
        problems += [f"{name}: fields without a text: {missing}"] if missing else []
    return problems


@pytest.mark.filterwarnings(
    "ignore:Item:UserWarning", "ignore::DeprecationWarning"
)  # of frameworks, as they are imported
@pytest.mark.parametrize("name", NAMES)
def test_numpydoc_finds_parameters_and_returns(name: str) -> None:
    for module, package in FRAMEWORKS.items():
        if name.startswith(module):
            pytest.importorskip(package, reason="make installs it: pip install -e '.[test-frameworks]'")
    assert [problem for each in members(name) for problem in problems_of(each)] == []
