"""Ray, on a cluster of this machine with two cores: results are those of one process."""

import json
import os
import runpy
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from typer.testing import CliRunner

from dejakv.cli.main import typer_app
from dejakv.errors import ConfigError, MissingExtraError
from dejakv.experiments import on_ray
from dejakv.experiments.estimate import estimate
from dejakv.experiments.on_ray import RayCluster, RequestsOn, experiments_on, run_on
from dejakv.experiments.run import run
from dejakv.experiments.settings import settings_from
from dejakv.experiments.summary import RunProgress
from dejakv.experiments.sweep import sweep
from dejakv.experiments.sweep_log import read_log

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error:::dejakv")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    ray.init(
        "local",
        num_cpus=2,
        object_store_memory=80_000_000,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        # Ray ends a worker where the machine's memory is full, of whatever it is full.
        _system_config={"memory_monitor_refresh_ms": 0},
    )
    yield RayCluster.connect("local")
    ray.shutdown()


def test_an_estimate_is_that_of_one_process(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Ann lives in Paris. Bob lives in Rome. " * 6
    lines = [
        json.dumps({"prompt": f"{name} asks: {text}", "answer": "Rome", "user": f"u{n % 3}", "timestamp": 100 - n})
        for n, name in enumerate(("Cid", "Dan", "Cid", "Ann", "cid", "Dan", "Ann", "Bob", "Cid", "Eve"))
    ]
    lines.insert(2, "{broken")
    lines.insert(5, "INFO 01-02 03:04:05 [api_server.py:1] started")
    lines.insert(12, "neither")
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(lines))
    monkeypatch.setattr(on_ray, "PART", 1500)
    wanted = estimate(log, "docs-lm", max_samples=9)
    found = estimate(log, "docs-lm", max_samples=9, reading=partial(RequestsOn, cluster))
    assert found == wanted
    assert (found["samples"], found["broken"]) == (9, 1)
    assert {row["level"] for row in found["rows"]} == {"exact", "exact_text", "semantic_text"}


def test_estimate_of_the_command_line_reads_on_ray(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, on_cluster = tmp_path / "log.jsonl", list[RayCluster]()
    log.write_text(json.dumps({"prompt": "Ann lives in Paris. Bob lives in Rome. " * 6}) + "\n")
    monkeypatch.setattr(
        on_ray, "RequestsOn", lambda cluster, *more: on_cluster.append(cluster) or RequestsOn(cluster, *more)
    )
    told = CliRunner().invoke(typer_app, ["estimate", "--ray", str(log)])
    assert told.exception is None
    assert on_cluster == [cluster]
    assert "prefixes of earlier prompts" in told.stdout


def test_a_data_set_is_not_read_in_parts(cluster: RayCluster) -> None:
    with pytest.raises(ConfigError, match="--ray reads a file in parts, and 'sessions' is a data set"):
        estimate("sessions", "docs-lm", reading=partial(RequestsOn, cluster))


def facts(rows: Any) -> list[Any]:
    """What samples got, without times and without what another order of requests changes."""
    return [(row.sample_id, {arm: outcome.text for arm, outcome in row.arms.items()}) for row in rows]


def test_workers_of_a_run_share_a_store_and_their_rows_are_merged(cluster: RayCluster, tmp_path: Path) -> None:
    given = {"max_samples": 9, "max_new_tokens": 2, "arms": ("none", "cache")}
    settings = settings_from(
        "docs", {**given, "output": str(tmp_path / "run")}, {"reuse": "exact", "store": str(tmp_path / "store")}
    )
    found = run_on(cluster, settings, RunProgress(), workers=2)
    wanted = run(settings_from("docs", given, {"reuse": "exact"}))
    assert facts(found.rows) == facts(wanted.rows)
    assert found.summary["workers"] == 2
    assert found.summary["arms"]["none"]["prompt_tokens"] == wanted.summary["arms"]["none"]["prompt_tokens"]
    assert found.summary["share_prefix"] == wanted.summary["share_prefix"]
    again = run_on(cluster, settings, RunProgress(), workers=2)
    assert again.earlier
    assert again.summary == json.loads((tmp_path / "run" / "summary.json").read_text())

    settings = settings_from("docs", given, {"reuse": "exact", "store": str(tmp_path / "store")})
    second = run_on(cluster, settings, RunProgress(), workers=2)
    assert second.summary["started_with_chunks"] == found.summary["store_entries"]  # of both workers
    assert all(row.arms["cache"].record.method == "exact" for row in second.rows)  # whoever stored it


@pytest.mark.parametrize(
    ("run_part", "cache_part", "says"),
    [
        ({"cache_mode": "dry-run"}, {}, "--ray runs a model, and --cache-mode dry-run does not"),
        ({}, {"store": "memory:"}, "is the memory of one process"),
        ({}, {"error_bound": 0.1, "reuse": "adopt"}, "--error-bound is learned from one stream"),
    ],
)
def test_what_one_stream_needs_is_refused(cluster: RayCluster, run_part: Any, cache_part: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_on(cluster, settings_from("docs", run_part, cache_part), RunProgress())


def test_a_sweep_has_the_lines_of_one_process(cluster: RayCluster, tmp_path: Path) -> None:
    spec = {
        "defaults": {"preset": "docs", "max_samples": 6, "cache_mode": "dry-run"},
        "grid": {"similarity_threshold": [0.6, 0.9]},
        "experiments": [{"name": "broken", "dataset": "jsonl", "dataset_path": str(tmp_path / "none")}],
    }
    sweep(spec, tmp_path / "one.csv")
    sweep(spec, tmp_path / "ray.csv", lines=experiments_on(cluster))
    one, many = (sorted(read_log(tmp_path / name), key=lambda line: line["name"]) for name in ("one.csv", "ray.csv"))
    assert [line["name"] for line in many if line["error"]] == ["broken"]
    assert many == one


def test_a_worker_that_dies_and_a_missing_extra_are_errors_of_ours(cluster: RayCluster) -> None:
    (_, died), *_ = cluster.map_unordered(os._exit, [(3,)])
    assert isinstance(died, ConfigError)
    assert "a worker of Ray ended" in str(died)
    ((_, missing),) = cluster.map_unordered(_without_an_extra, [()])
    assert "pip install" in str(missing)


def _without_an_extra() -> None:
    raise MissingExtraError("usearch", "hnsw", "an index")


def test_a_cluster_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **more: Any) -> None:
        raise ConnectionError("no cluster there")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refused)
    for command in (
        ["estimate", "--ray", "auto", "log.jsonl"],
        ["run", "--ray", "auto"],
        ["sweep", "--ablation", "--ray", "auto"],
    ):
        result = CliRunner().invoke(typer_app, command)
        assert isinstance(result.exception, ConfigError), command
        assert "--ray 'auto' cannot be reached (ConnectionError: no cluster there): start it" in str(result.exception)


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = CliRunner().invoke(typer_app, ["estimate", "--ray", "log.jsonl"])
    assert isinstance(result.exception, MissingExtraError)
    assert "--ray needs the package 'ray' (extra ray): python -m pip install 'ray" in str(result.exception)


def test_actors_share_a_store(cluster: RayCluster, capsys: pytest.CaptureFixture[str]) -> None:
    """The example runs on the cluster of this module."""
    example = Path(__file__).parents[2] / "examples" / "ray_actors.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [example.name])
        runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == [
        "first actor: rome, 18 of 18 tokens computed",
        "second actor: rome, 1 of 18 tokens computed",
    ]
