"""Small real runs: three arms, the dry run, a sweep that is resumed."""

import json
from pathlib import Path
from typing import Any

import pytest

from dejakv.engines.open import open_engine
from dejakv.experiments.run import run
from dejakv.experiments.settings import settings_from
from dejakv.experiments.sweep import sweep


@pytest.fixture(scope="module")
def engine() -> Any:
    settings = settings_from("shapes", {}, {})
    return open_engine(settings, settings.cache)


@pytest.fixture(scope="module")
def result(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    output = tmp_path_factory.mktemp("run")
    return run(settings_from("shapes", {"max_samples": 60, "output": str(output)}, {}), engine=engine)


def test_the_files_of_a_run(result: Any) -> None:
    summary = json.loads((result.output / "summary.json").read_text())
    lines = [json.loads(line) for line in (result.output / "samples.jsonl").read_text().splitlines()]
    assert summary == json.loads(json.dumps(result.summary))
    assert len(lines) == summary["samples"] == 60
    statuses = {name for line in lines for name in line["statuses"]}
    assert {"exact_text", "semantic_text", "embedding:prompt", "embedding:vision", "kv_cache"} <= statuses


def fields(values: dict[str, Any], *path: str) -> list[str]:
    """The names in a summary, down to the figures. Counts of reasons, levels and methods are named by what was counted, and the machine by what it has: left out."""
    found: list[str] = []
    for name, value in values.items():
        counted = name in ("not_used", "by_method", "hook_counts", "evictions", "failed_writes", "not_run", "measured")
        inner = fields(value, *path, name) if isinstance(value, dict) and not counted else []
        found += inner or [".".join((*path, name))]
    return found


def test_the_fields_of_a_summary_are_the_golden_ones(result: Any) -> None:
    """They are read by scripts: docs and CHANGELOG tell of a change."""
    golden = Path(__file__).parent / "golden" / "summary-fields.txt"
    assert "\n".join(fields(result.summary)) + "\n" == golden.read_text()


def test_what_is_exact_agrees_and_every_picture_is_encoded_once(result: Any) -> None:
    summary = result.summary
    assert summary["by_level"]["exact_text"]["agreement"] == 1.0
    assert summary["arms"]["cache"]["computed_tokens"] < summary["arms"]["prefix"]["computed_tokens"]
    assert summary["arms"]["prefix"]["computed_tokens"] < summary["arms"]["none"]["computed_tokens"]
    assert summary["arms"]["none"]["encoder_runs"] == 60
    pictures = {media.digest for sample in _samples(60) for media in sample.media}
    assert summary["arms"]["cache"]["encoder_runs"] == len(pictures)


def _samples(count: int) -> list[Any]:
    from dejakv.experiments.samples import read_samples

    return list(read_samples(settings_from("shapes", {"max_samples": count}, {})))


def test_prefix_and_none_give_the_same_answers(result: Any) -> None:
    for row in result.rows:
        assert row.arms["prefix"].text == row.arms["none"].text


def test_a_dry_run_never_runs_the_decoder(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the decoder ran")

    monkeypatch.setattr(type(engine), "run", refuse)
    settings = settings_from("shapes", {"max_samples": 60, "cache_mode": "dry-run", "output": str(tmp_path)}, {})
    summary = run(settings, engine=engine).summary
    assert summary["hit_rate"] > 0
    assert 0 <= summary["false_hit_interval"][0] <= summary["false_hit_interval"][1] <= 1
    assert summary["judged"] == sum(level["hits"] for level in summary["by_level"].values())


def test_ignoring_media_is_labelled_and_gives_false_hits_away(engine: Any) -> None:
    run_part = {"max_samples": 120, "cache_mode": "dry-run"}
    cache_part = {"embedding_layers": [], "embedding_hook": "none"}
    exact = run(settings_from("shapes", run_part, cache_part), engine=engine).summary
    ignoring = run(settings_from("shapes", run_part, {**cache_part, "media": "ignore"}), engine=engine).summary
    assert ignoring["media"] == "ignore"
    assert ignoring["false_hits"] > exact["false_hits"]


def test_cache_mode_off_has_no_cache_arm(engine: Any) -> None:
    summary = run(settings_from("shapes", {"max_samples": 4, "cache_mode": "off"}, {}), engine=engine).summary
    assert set(summary["arms"]) == {"none", "prefix"}


def test_an_experiment_that_fails_is_a_line_and_the_next_one_runs(tmp_path: Path) -> None:
    """Resuming tries it again, and its line is the new one then."""
    log = tmp_path / "log.csv"
    data = tmp_path / "later.jsonl"
    ours = {"name": "ours", "model": "docs-lm", "dataset": "jsonl", "dataset_path": str(data), "cache_mode": "dry-run"}
    spec = {"experiments": [ours, {"name": "shapes", "preset": "shapes", "max_samples": 2, "cache_mode": "dry-run"}]}
    failed, done = sweep(spec, log)
    assert "later.jsonl" in failed["error"]
    assert failed["samples"] is None
    assert not done["error"]
    assert done["samples"] == 2
    data.write_text('{"question": "Where does Ann live?"}\n')
    (again,) = sweep(spec, log, resume=True)
    assert (again["name"], again["samples"], again["error"]) == ("ours", 1, None)
    assert sweep(spec, log, resume=True) == []
    assert log.read_text().count("ours") == 1
