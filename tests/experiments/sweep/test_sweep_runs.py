"""Sweeps that fail and are resumed."""

from pathlib import Path
from typing import Any

import pytest

from dejakv.datasets.base import Sample
from dejakv.errors import ConfigError
from dejakv.experiments.sweep import sweep
from dejakv.experiments.sweep_log import COLUMNS, open_log

TINY = {"model": "docs-lm", "dataset": "docs", "max_samples": 1, "cache_mode": "dry-run"}


class Breaks:
    """A data set with a mistake in its code."""

    name = "breaks"

    def __init__(self, **_: Any) -> None:
        """Whatever the command line says."""

    def __iter__(self) -> Any:
        yield Sample("1", "a question")
        raise RuntimeError("a mistake\nof two lines")


def grid(**more: Any) -> dict[str, Any]:
    return {"defaults": TINY, "grid": {"name": "s{seed}", "seed": [1, 2]}, **more}


def test_a_mistake_in_foreign_code_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "foreign_breaks.py").write_text(Path(__file__).read_text().split("def grid")[0])
    spec = grid(experiments=[{"name": "bad", "dataset": "foreign_breaks:Breaks"}])
    spec["experiments"][0] |= {"max_samples": 5}
    lines = {line["name"]: line for line in sweep(spec, tmp_path / "log.csv")}
    assert lines["bad"]["error"] == "unexpected RuntimeError: a mistake of two lines"
    assert [lines[name]["error"] for name in ("s1", "s2")] == [None, None]


def test_other_settings_are_not_resumed(tmp_path: Path) -> None:
    sweep(grid(), tmp_path / "log.csv")
    before = (tmp_path / "log.csv").read_bytes()
    assert sweep(grid(), tmp_path / "log.csv", resume=True) == []
    with pytest.raises(ConfigError, match=r"'s1' has run with other settings \(max_samples\)"):
        sweep({**grid(), "defaults": {**TINY, "max_samples": 2}}, tmp_path / "log.csv", resume=True)
    assert (tmp_path / "log.csv").read_bytes() == before


def test_one_log_is_written_by_one_sweep(tmp_path: Path) -> None:
    with open_log(tmp_path / "log.csv", resume=False), pytest.raises(ConfigError, match="by another sweep"):
        sweep(grid(), tmp_path / "log.csv", resume=True)
    assert len(sweep(grid(), tmp_path / "log.csv", resume=True)) == 2


def test_rows_of_one_name_are_no_log(tmp_path: Path) -> None:
    row = ",".join(["a"] + [""] * (len(COLUMNS) - 1))
    (tmp_path / "log.csv").write_text(f"{','.join(COLUMNS)}\r\n{row}\r\n{row}\r\n")
    with pytest.raises(ConfigError, match="two rows have one name"):
        sweep(grid(), tmp_path / "log.csv", resume=True)
