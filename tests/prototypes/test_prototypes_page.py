"""The table, the page made from it, and the tests agree: no name is without a test or a replacement."""

import re
from pathlib import Path

import pytest
from scripts.prototypes_page import END, START, page, section
from tests.prototypes.conftest import CHECKS, DOCS, TABLE

PAGE = (DOCS / "index.md").read_text(encoding="utf-8")
TESTS = [file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("test_*.py"))]


def test_every_name_has_either_a_check_or_a_replacement() -> None:
    for document, rows in TABLE.items():
        for name, row in rows.items():
            assert ("check" in row) != ("instead" in row), (document, name)
            assert set(row) <= {"check", "here", "instead"}, (document, name)
            assert all(row.values()), (document, name)


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_is_a_test_that_ticks_its_names_off(check: str) -> None:
    bodies = [body for text in TESTS for body in re.split(r"\n(?=def |@)", text) if f'Names("{check}")' in body]
    assert len(bodies) == 1, f"{len(bodies)} tests for {check}"
    assert ".done()" in bodies[0]


def test_the_page_has_every_name() -> None:
    made = section(TABLE)
    assert PAGE[PAGE.index(START) : PAGE.index(END) + len(END)] == made, "run python -m scripts.prototypes_page"
    assert page(PAGE, TABLE) == PAGE
    for rows in TABLE.values():
        for name in rows:
            assert f"`{name}`" in made or f"| `{name.replace('|', '¦')}` |" in made, name


def test_replacements_in_code_marks_exist() -> None:
    """A module or command that the table names as the replacement is there."""
    for rows in TABLE.values():
        for row in rows.values():
            for module in re.findall(r"`(dejakv\.[a-z_.]+)`", row.get("instead", "")):
                parts = Path("src", *module.split("."))
                root = Path(__file__).parents[2]
                assert (root / parts).is_dir() or (root / parts.with_suffix(".py")).is_file(), module
