"""Readers of data sets beside a cache in the user's home that others have filled: their rows stay theirs."""

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from dejakv.datasets.registry import DatasetOptions, open_dataset

pyarrow = pytest.importorskip("pyarrow", reason="the extra `hub` brings it")
from pyarrow.parquet import write_table  # noqa: E402

NAME, CONFIG, IMAGES = "hub", "val_balanced_instructions", "val_balanced_images"


def copy_of_the_hub(folder: Path, town: str, rows: int = 5) -> Path:
    """A local copy with GQA's layout: the pictures in groups of two rows."""
    names = [f"{town}-{number}" for number in range(rows)]
    questions = [
        {"id": f"q{n}", "imageId": names[(n * 3) % rows], "question": f"Is {town} {n}?", "answer": "yes"}
        for n in range(rows)
    ]
    images = [{"id": name, "image": {"bytes": name.encode(), "path": f"{name}.jpg"}} for name in names]
    for config, found in ((CONFIG, questions), (IMAGES, images)):
        (folder / config).mkdir(parents=True)
        write_table(pyarrow.Table.from_pylist(found), folder / config / "val-00000-of-00001.parquet", row_group_size=2)
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {config}\n  data_files:\n  - split: val\n    path: {config}/val-*\n"
            for config in (CONFIG, IMAGES)
        )
        + "---\n"
    )
    return folder


def rows_of(path: Path, **more: Any) -> list[tuple[str, bytes]]:
    found = open_dataset("gqa", DatasetOptions(path=str(path), **more))
    return [(sample.question, sample.media[0].data) for sample in found]


def wanted(town: str, rows: int = 5) -> list[tuple[str, bytes]]:
    return [(f"Is {town} {n}?", f"{town}-{n * 3 % rows}".encode()) for n in range(rows)]


def test_copies_with_one_name_keep_their_rows(tmp_path: Path) -> None:
    towns = ("Oslo", "Rome", "Lima")
    copies = {town: copy_of_the_hub(tmp_path / town / NAME, town) for town in towns}
    for town in (*towns, *reversed(towns)):
        assert rows_of(copies[town]) == wanted(town)


def test_a_copy_that_changes_is_read_as_it_is(tmp_path: Path) -> None:
    path = copy_of_the_hub(tmp_path / NAME, "Oslo")
    assert rows_of(path) == wanted("Oslo")
    for file in path.rglob("*.parquet"):
        file.unlink()
    for config in (CONFIG, IMAGES):
        (path / config).rmdir()
    copy_of_the_hub(path, "Rome", rows=7)
    assert rows_of(path) == wanted("Rome", rows=7)


READERS = """
import sys
from hashlib import sha256
from pathlib import Path
from dejakv.datasets.registry import DatasetOptions, open_dataset, samples

for line in sys.argv[1:]:
    name, path = line.split("=")
    found = samples(open_dataset(name, DatasetOptions(path=path or None, max_samples=8)), 8)
    print(line.partition("=")[0], sha256(repr(list(found)).encode()).hexdigest())
"""

FILL = "import sys; from datasets import load_dataset; print([len(load_dataset(sys.argv[1], c, split='val')) for c in sys.argv[2:]])"


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def python(home: Path, program: str, *arguments: str) -> str:
    variables = {**os.environ, "HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_reader_beside_a_foreign_cache(tmp_path: Path) -> None:
    mine, foreign = (copy_of_the_hub(tmp_path / town / NAME, town) for town in ("Oslo", "Rome"))
    (tmp_path / "files").mkdir()
    files = {"log": {"prompt": "Where?"}, "rag": {"question": "Where?", "passages": ["Here."]}}
    for name, record in files.items():
        (tmp_path / "files" / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "files" / "gqa.json").write_text(json.dumps({"1": {"question": "Is it?", "imageId": "1"}}))
    lines = [f"gqa={mine}", f"gqa={tmp_path / 'files' / 'gqa.json'}", "repo=", "sessions=", "rag=", "docs=", "shapes="]
    lines += [f"{name}={tmp_path / 'files' / name}.jsonl" for name in files]

    empty, filled = tmp_path / "empty", tmp_path / "filled"
    for home in (empty, filled):
        home.mkdir()
    assert python(filled, FILL, str(foreign), CONFIG, IMAGES) == "[5, 5]\n"
    before = tree(filled)
    assert any(name.endswith(".arrow") for name in before), "the cache is filled"

    assert python(filled, READERS, *lines) == python(empty, READERS, *lines)
    assert tree(filled) == before
    assert tree(empty) == {}, "nothing is written into a home"


def test_the_tests_have_a_home_of_their_own() -> None:
    import pwd

    assert Path.home() != Path(pwd.getpwuid(os.getuid()).pw_dir)
    from huggingface_hub import constants

    from datasets import config

    for place in (config.HF_CACHE_HOME, config.HF_DATASETS_CACHE, constants.HF_HUB_CACHE, constants.HF_HOME):
        assert Path(place).is_relative_to(Path.home())
