"""Runs over several seeds, and donors that were wrong once."""

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dejakv.engines.open import open_engine
from dejakv.errors import ConfigError
from dejakv.experiments.run import run
from dejakv.experiments.seeds import pooled, run_seeds, show_seeds
from dejakv.experiments.settings import RunSettings, settings_from
from dejakv.experiments.watch import Silent


def loose(**run_part: Any) -> RunSettings:
    """Settings under which donors of other questions are adopted, and answers change."""
    cache = {"lexical_guard": False, "similarity_threshold": 0.3, "embedding_layers": [], "embedding_hook": "none"}
    return settings_from("shapes", {"max_samples": 40, "arms": ("none", "cache"), **run_part}, cache)


def test_a_donor_that_was_wrong_is_not_offered_again() -> None:
    settings = loose()
    done = run(settings, engine=open_engine(settings, settings.cache))
    wrong = Counter(
        row.arms["cache"].record.donor
        for row in done.rows
        if row.arms["cache"].record.method == "adopt" and not row.agrees("cache")
    )
    assert wrong, "no donor was wrong: the settings are not loose enough for this test"
    assert set(wrong.values()) == {1}
    assert any(reason.startswith("known_wrong: ") for reason in done.summary["not_used"])


def test_a_resumed_run_still_knows_them(tmp_path: Path) -> None:
    settings = loose(output=str(tmp_path))
    engine = open_engine(settings, settings.cache)
    whole = run(settings, engine=engine)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_text("".join(lines[:25]))
    again = run(settings, engine=engine, resume=True)
    assert [row.arms["cache"].record.donor for row in again.rows] == [
        row.arms["cache"].record.donor for row in whole.rows
    ]


def test_the_report_over_seeds_has_each_and_all(tmp_path: Path) -> None:
    settings = loose(max_samples=12, output=str(tmp_path), seed=3)
    done = run_seeds(settings, 2, Silent())
    assert done.seeds == (3, 4)
    alone = run(replace(settings, seed=4, output=None)).summary
    figures = pooled(done)
    assert figures["seeds"][1]["hit_rate"] == alone["hit_rate"]
    assert figures["seeds"][1]["changed"] == round((1 - alone["agreement"]) * 12)
    assert figures["changed"] == sum(row["changed"] for row in figures["seeds"])
    assert figures["changed_of"] == 24
    assert figures["changed_interval"][0] <= figures["changed"] / 24 <= figures["changed_interval"][1]
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(figures))
    assert json.loads((tmp_path / "seed-4" / "summary.json").read_text())["seed"] == 4
    console = Console(file=io.StringIO(), width=160, record=True)
    show_seeds(done, console)
    assert f"answers changed: {figures['changed']} of 24 over 2 seeds" in console.export_text()


def test_a_data_set_from_a_file_is_drawn_anew_by_shuffling(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text("".join(f'{{"question": "number {n}?", "id": "{n}"}}\n' for n in range(40)))
    given = {"model": "docs-lm", "dataset": "jsonl", "dataset_path": str(tmp_path / "q.jsonl"), "max_samples": 5}
    settings = settings_from(None, {**given, "cache_mode": "shares", "output": str(tmp_path / "out")}, {})
    run_seeds(settings, 2, Silent())
    drawn = [
        [
            json.loads(line)["id"]
            for line in (tmp_path / "out" / f"seed-{seed}" / "samples.jsonl").read_text().splitlines()
        ]
        for seed in (0, 1)
    ]
    assert len(drawn[0]) == len(drawn[1]) == 5
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("count", "cache", "says"), [(1, {}, "give 2 or more"), (2, {"cache_dir": "kept"}, "leave the folder out")]
)
def test_mistakes(count: int, cache: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_seeds(settings_from("shapes", {}, cache), count, Silent())
