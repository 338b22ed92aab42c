"""Packages read as source, and the prompts made of them."""

import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dejakv.datasets.registry import DatasetOptions, open_dataset
from dejakv.datasets.repo import INSTRUCTION, MAX_PROMPT_CHARACTERS, RepoDataset, read_package
from dejakv.errors import DatasetError
from dejakv.experiments.samples import SamplePrompter
from dejakv.experiments.shares import TokenShares
from dejakv.models import tokenizer_folder

EXPLODES = "raise RuntimeError('this was run')\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package that must not be imported, with a cycle of calls, a broken file and tests in it."""
    folder = tmp_path / "fragile"
    (folder / "tests").mkdir(parents=True)
    body = "".join(f"    total += {number}  # a line of some length\n" for number in range(30))
    (folder / "__init__.py").write_text(EXPLODES)
    (folder / "low.py").write_text(f"{EXPLODES}def base(total=0):\n    '''The base.'''\n{body}    return total\n")
    (folder / "high.py").write_text(
        f"{EXPLODES}class Uses:\n    def go(self):\n{body.replace('    total', '        total')}        return base() + back()\n\n"
        f"def back():\n{body}    return Uses().go()\n"
    )
    (folder / "broken.py").write_text("def half(:\n")
    (folder / "tests" / "test_low.py").write_text("def test_base():\n    assert base()\n")
    return folder


def test_a_package_is_read_and_never_run(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(package.parent))
    for given in (str(package), "fragile"):
        found = read_package(given)
        assert found.name == "fragile"
        assert {item.name for item in found.objects} == {"low.base", "high.Uses", "high.Uses.go", "high.back"}
        assert "tests/test_low.py" not in found.files
    assert "fragile" not in sys.modules
    (go,) = (item for item in found.objects if item.short == "go")
    assert go.calls == {"base", "back"}
    assert go.code.startswith("    def go(self):")


def test_what_is_called_is_documented_first(package: Path) -> None:
    names = [sample.fields["object"] for sample in RepoDataset(str(package))]
    assert names.index("low.base") < names.index("high.Uses.go")
    assert sorted(names) == ["high.Uses", "high.Uses.go", "high.back", "low.base"]


def test_a_prompt_holds_tree_code_callees_and_callers(package: Path) -> None:
    (sample,) = (s for s in RepoDataset(str(package)) if s.fields["object"] == "low.base")
    assert "* low.py" in sample.context
    assert "  high.py" in sample.context
    assert "It is called by:\n" in sample.context
    assert sample.question == f"{INSTRUCTION}\nThe object: low.base."
    (sample,) = (s for s in RepoDataset(str(package)) if s.fields["object"] == "high.back")
    assert "It calls:\n" in sample.context


def test_the_same_seed_gives_the_same_stream_and_another_another() -> None:
    streams = [[s.fields["object"] for s in RepoDataset("email", seed)] for seed in (0, 0, 7)]
    assert streams[0] == streams[1] != streams[2]
    assert sorted(streams[0]) == sorted(streams[2])


@pytest.mark.parametrize("name", ["email", "json", "asyncio"])
def test_prompts_have_the_promised_size_and_move(name: str) -> None:
    """600 to 2,000 tokens for nine of ten prompts, none much larger, and most of them was there before, elsewhere."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder("smollm2-135m"))
    prompter, shares = SamplePrompter(tokenizer, None, "prompt"), TokenShares()
    sizes: list[int] = []
    for sample in list(RepoDataset(name))[:60]:
        assert len(sample.context) <= MAX_PROMPT_CHARACTERS
        ids = tokenizer(prompter.prompt(sample))["input_ids"]
        sizes.append(len(ids))
        shares.add(ids)
    assert sum(600 <= size <= 2_000 for size in sizes) >= 0.9 * len(sizes)
    assert max(sizes) < 2_400
    assert shares.total.share_prefix < 0.25
    assert shares.total.share_anywhere > 0.5


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_package_here", "not installed"),
        ("sys", "built into the interpreter"),
        ("email.nothing", "not installed"),
        ("_heapq", "no Python source|built into|not installed"),
        ("numpy._core._multiarray_umath", "no Python source"),
        ("/no/such/folder", "no folder '/no/such/folder'"),
        ("not a name", "no folder"),
    ],
)
def test_what_has_no_source_says_so(name: str, says: str) -> None:
    with pytest.raises(DatasetError, match=says):
        open_dataset("repo", DatasetOptions(path=name))


def test_a_folder_without_code(tmp_path: Path) -> None:
    (tmp_path / "notes.py").write_text("x = 1\n")
    with pytest.raises(DatasetError, match="no Python source with classes or functions"):
        RepoDataset(str(tmp_path))


def test_a_package_too_small_for_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text("def f():\n    return 1\n")
    with pytest.raises(DatasetError, match="name a larger package"):
        list(RepoDataset(str(tmp_path)))
