"""Specifications: grids, defaults, overrides, YAML, and mistakes that are seen before the first run."""

from pathlib import Path
from typing import Any

import pytest
import typer

from dejakv.cli.main import typer_app
from dejakv.errors import ConfigError
from dejakv.experiments.settings import KEYS
from dejakv.experiments.sweep import ablation, expand_entries, read_experiments, read_file

YAML = """
defaults: {preset: docs, max_samples: 5}
notes: thresholds and qualities
grid:
  similarity_threshold: [0.5, 0.7]
  blend_quality: [strict, loose]
  reuse: blend
experiments:
  - {name: exact, reuse: exact, max_samples: 7, notes: nothing approximate}
"""

NOT_KEYS = {"resume", "log_samples", "brief", "set_", "config", "help_all", "ray", "ray_workers"}
"""Options of `run` that say how it is shown, continued or given, or where it runs, not what it does."""


def test_a_grid_of_yaml(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(YAML)
    found = {
        name: (settings, notes)
        for name, settings, notes in read_experiments(read_file(tmp_path / "spec.yaml", "--specs"), None)
    }
    assert list(found) == [
        "similarity_threshold-0.5-blend_quality-strict", "similarity_threshold-0.5-blend_quality-loose",
        "similarity_threshold-0.7-blend_quality-strict", "similarity_threshold-0.7-blend_quality-loose", "exact",
    ]  # fmt: skip
    loose = found["similarity_threshold-0.7-blend_quality-loose"][0]
    assert (loose.cache.similarity_threshold, loose.cache.blend_quality, loose.max_samples) == (0.7, "loose", 5)
    exact, notes = found["exact"]
    assert (exact.cache.reuse, exact.max_samples, exact.dataset, notes) == ("exact", 7, "docs", "nothing approximate")


def test_a_grid_names_its_combinations_by_a_template() -> None:
    spec = {"grid": [{"name": "{model}-t{similarity_threshold}", "model": ["a/b"], "similarity_threshold": [0.5, 1]}]}
    assert [entry["name"] for entry in expand_entries(spec)] == ["a_b-t0.5", "a_b-t1"]


def test_a_list_is_a_value_inside_a_list() -> None:
    spec = {"grid": {"embedding_layers": [["prompt:auto:0.5"], ["prompt:auto:0.5", "vision:auto:0.9"], []]}}
    assert [entry["embedding_layers"] for entry in expand_entries(spec)] == spec["grid"]["embedding_layers"]
    assert len({entry["name"] for entry in expand_entries(spec)}) == 3


def test_every_flag_of_run_is_a_key() -> None:
    command: Any = typer.main.get_command(typer_app)
    flags = {option.name for option in command.get_command(None, "run").params} - NOT_KEYS
    assert flags - set(KEYS) == set()


def test_flags_of_one_item_are_lists() -> None:
    (found,) = read_experiments(
        {"experiments": [{"name": "a", "embedding-layer": "prompt:auto:0.5", "preset": "docs"}]}, None
    )
    assert found.settings.cache.embedding_layers == ("prompt:auto:0.5",)


WRONG: list[tuple[Any, str]] = [
    ({"experiments": [{"name": "a", "similarty_threshold": 0.5}]}, "did you mean similarity_threshold"),
    ({"experiments": [{"name": "a"}], "default": {}}, "did you mean defaults"),
    ({"grid": {}}, "give an object of lists"),
    ({"grid": {"seed": []}}, "'seed' is an empty list"),
    ({"grid": {"seed": [1, 1]}}, "needs its own name"),
    ({"grid": {"seed": [1, "two"]}}, "--seed='two' is no whole number"),
    ({"grid": {"name": "{sed}", "seed": [1, 2]}}, "with keys of the grid, seed"),
    ({"grid": {"name": "{seed", "seed": [1, 2]}}, "is not valid"),
    ({"grid": {"name": 5, "seed": [1, 2]}}, "is not valid"),
    ({"grid": {"seed": list(range(200)), "window": list(range(200))}}, "more than 10,000"),
    ({"experiments": []}, "one or more objects"),
    ([], "not a sweep"),
]


@pytest.mark.parametrize(("spec", "says"), WRONG, ids=[says for _, says in WRONG])
def test_a_wrong_sweep_is_refused(spec: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        list(read_experiments(spec, None))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "a: [", "cannot read"),
        ("a.yml", "a: !!python/object/apply:os.getcwd []\n", "cannot read"),
        ("a.json", "a: 1", "cannot read"),
    ],
)
def test_a_file_that_is_no_specification(name: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_file(tmp_path / name, "--specs")


def test_models_with_one_folder_name_have_runs_of_their_own() -> None:
    spec = ablation(["org/tiny", "other/tiny"])
    assert len({name for name, _, _ in read_experiments({**spec, "defaults": {"dataset": "gqa"}}, None)}) == 2 * 16
    with pytest.raises(ConfigError, match="needs its own name"):
        read_experiments(ablation(["org/tiny", "org/tiny"]))
