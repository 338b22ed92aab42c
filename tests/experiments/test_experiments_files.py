"""What runs and sweeps write, replace and delete: their own files and stores, and nothing else."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from dejakv import open_store
from dejakv.errors import ConfigError
from dejakv.experiments.output import replace_file, write_run
from dejakv.experiments.run import run
from dejakv.experiments.settings import settings_from
from dejakv.experiments.sweep import sweep
from dejakv.experiments.sweep_log import COLUMNS, open_log, read_log
from dejakv.testing import make_stored_state

SUMMARY = {"dejakv_version": "0.1.0", "samples": 1}
LINE = dict.fromkeys(COLUMNS, "") | {"name": "a"}


def one_run(**entry: Any) -> dict[str, Any]:
    defaults = {"preset": "docs", "max_samples": 1, "cache_mode": "dry-run"}
    return {"defaults": defaults, "experiments": [{"name": "a", **entry}]}


def test_an_earlier_run_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    write_run(tmp_path, SUMMARY, lines=[{"id": 1}, {"id": 2}])
    write_run(tmp_path, SUMMARY, lines=[{"id": 3}])
    assert (tmp_path / "samples.jsonl").read_text() == '{"id": 3}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "samples.jsonl", "summary.json"]


@pytest.mark.parametrize("name", ["summary.json", "samples.jsonl"])
def test_files_that_no_run_wrote_are_not_overwritten(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(ConfigError, match=f"has a {name} that no run wrote"):
        write_run(tmp_path, SUMMARY, lines=[])
    assert (tmp_path / name).read_text() == '{"mine": 1}'


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    replace_file(tmp_path / "link", "ours", "--output")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "link").read_text() == "ours"


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="--html"):
        replace_file(tmp_path / "folder", "x", "--html")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_a_log_is_gone_on_with_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with open_log(path, resume=False) as first:
        first.append(LINE)
    written = path.read_bytes()
    with pytest.raises(ConfigError, match="--resume"), open_log(path, resume=False):
        pass
    assert path.read_bytes() == written
    with open_log(path, resume=True) as again:
        assert [line["name"] for line in again.lines] == ["a"]
        again.append({**LINE, "name": "b", "notes": 'a "quoted", text\nof two lines'})
    assert [line["name"] for line in read_log(path)] == ["a", "b"]


HEAD = ",".join(COLUMNS).encode()


TEXTS = ("=1+1", "@SUM(A1)", "+1+1", "-1+1", "\t=1", "\n=1", " =1", "'=1", "''=1", "'plain", "plain", "-0.5", "")


def test_cells_of_a_sweeps_log_are_no_formulas(tmp_path: Path) -> None:
    """A spreadsheet runs what begins with such a letter; whoever reads the log gets the texts as they were."""
    path = tmp_path / "log.csv"
    lines = [
        {**dict.fromkeys(COLUMNS, ""), "name": f"={n}", "notes": text, "hit_rate": -0.5} for n, text in enumerate(TEXTS)
    ]
    for line in lines:
        with open_log(path, resume=path.exists()) as log:
            log.append(line)
    assert [(line["name"], line["notes"], line["hit_rate"]) for line in read_log(path)] == [
        (line["name"], line["notes"], "-0.5") for line in lines
    ]
    cells = [cell for row in csv.reader(io.StringIO(path.read_text(), newline="")) for cell in row]
    assert [cell for cell in cells if cell.lstrip()[:1] in ("=", "@", "+", "-") and cell != "-0.5"] == []


@pytest.mark.parametrize("content", [b"", b"name,model\n", b"\xff\xfe", HEAD + b"\n" + b"{," * 30 + b"{\n"])
def test_a_foreign_log_stays_as_it_is(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ConfigError, match="no log of a sweep"):
        sweep(one_run(), tmp_path / "a.csv", resume=True)
    assert (tmp_path / "a.csv").read_bytes() == content


def test_purging_deletes_a_store_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    assert store.put(make_stored_state(1))
    store.close()
    (tmp_path / "store" / "mine.txt").write_text("mine")
    sweep(one_run(cache_dir=str(tmp_path / "store")), tmp_path / "log.csv", purge=True)
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["mine.txt"]


def test_a_dry_run_leaves_a_cache_directory_alone(docs_engine: Any, tmp_path: Path) -> None:
    cache = {"cache_dir": str(tmp_path / "c"), "reuse": "exact"}
    dry = settings_from("docs", {"max_samples": 4, "cache_mode": "dry-run"}, cache)
    assert run(dry, engine=docs_engine).summary["samples"] == 4
    assert not (tmp_path / "c").exists()
    live = settings_from("docs", {"max_samples": 4, "arms": ("none", "cache")}, cache)
    first = run(live, engine=docs_engine).summary
    assert first["started_with_chunks"] == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*")}
    run(dry, engine=docs_engine)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*")} == before
    assert run(live, engine=docs_engine).summary["by_method"]["exact"] == 4
