"""What tests/README.md and tests/conftest.py say of the tests' files is true."""

import re
from pathlib import Path

import pytest
from tests.conftest import DEAREST

TESTS = Path(__file__).parent
README = (TESTS / "README.md").read_text()
PACKAGE = TESTS.parent / "src" / "dejakv"


def rows(heading: str) -> list[tuple[str, str]]:
    """The two cells of each row of the table below a heading."""
    section = README.partition(f"\n## {heading}")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ", 1) for line in section.splitlines() if line.startswith("| ")]
    return [(first, second) for first, second in cells[1:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([\w/*.-]+)`", cell)


@pytest.mark.parametrize(("changed", "run"), rows("You changed"))
def test_each_row_names_modules_and_tests_that_exist(changed: str, run: str) -> None:
    for name in names(run):
        assert list(TESTS.glob(name)), name
    for name in names(changed):
        roots = (PACKAGE, PACKAGE.parents[1], PACKAGE / "engines" / "transformers")
        assert any((root / name).exists() for root in roots), name


def test_each_folder_of_tests_stands_in_the_table() -> None:
    told = {name.split("/")[0] for _, run in rows("You changed") for name in names(run)}
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and not path.name.startswith(("_", "."))}
    assert folders - told == set()


def test_each_helper_module_stands_in_the_table() -> None:
    own = ("conftest.py", "__init__.py", "__main__.py")
    modules = {path for path in TESTS.rglob("*.py") if not path.name.startswith("test_") and path.name not in own}
    told = [name for module, _ in rows("Helpers") for name in names(module)]
    assert sorted(told) == sorted(path.relative_to(TESTS).as_posix() for path in modules)


def test_the_dearest_files_exist() -> None:
    assert [name for name in DEAREST if not list(TESTS.rglob(name))] == []
    assert len(set(DEAREST)) == len(DEAREST)
