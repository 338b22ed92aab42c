"""Many runs from one specification: `{"defaults": {...}, "experiments": [{"name": ..., ...}, ...]}`.

An entry may name a `preset`; its own settings win over the defaults, and these over the preset. Names are the flags of
`dejakv run` with underscores.
"""

import csv
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError
from dejakv.experiments.run import run
from dejakv.experiments.settings import RunSettings, settings_from

NOT_SETTINGS = ("name", "preset", "notes")
SWITCHES = {
    "disable_semantic_cache": ("semantic_text", False),
    "disable_exact_cache": ("exact_text", False),
    "disable_prefix_cache": ("exact_prefix", False),
    "disable_lexical_guard": ("lexical_guard", False),
}
COLUMNS: tuple[str, ...] = (
    "name", "model", "dataset", "samples", "hit_rate", "agreement", "false_hits", "prefix_hits",
    "accuracy_none", "accuracy_prefix", "accuracy_cache",
    "computed_none", "computed_prefix", "computed_cache", "encoder_runs_none", "encoder_runs_cache",
    "ttft_p50_none", "ttft_p50_prefix", "ttft_p50_cache", "ttft_p95_none", "ttft_p95_prefix", "ttft_p95_cache",
    "notes", "settings",
)  # fmt: skip


def split_settings(entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run settings and cache settings of an entry. Raises ConfigError for a name neither knows."""
    cache_names = {item.name for item in fields(SemanticCacheConfig)}
    run_names = {item.name for item in fields(RunSettings)} - {"cache"}
    run_part: dict[str, Any] = {}
    cache_part: dict[str, Any] = {}
    for name, value in entry.items():
        plain = name.replace("-", "_")
        if plain in NOT_SETTINGS:
            continue
        if plain in SWITCHES:
            target, off = SWITCHES[plain]
            cache_part[target] = off if value else not off
        elif plain in cache_names:
            cache_part[plain] = value
        elif plain in run_names:
            run_part[plain] = value
        else:
            raise ConfigError(f"sweep entry {entry.get('name', '?')!r} has the unknown setting {name!r}")
    return run_part, cache_part


def read_spec(path: str | Path) -> dict[str, Any]:
    """A specification file. Raises ConfigError if it is missing, no JSON, or an experiment has no name of its own."""
    try:
        spec: Any = json.loads(Path(path).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot read the sweep {str(path)!r}: {error}") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("experiments"), list):
        raise ConfigError(f"{str(path)!r} is no sweep: it needs a list 'experiments'")
    names = [entry.get("name") for entry in spec["experiments"]]
    if None in names or len(set(names)) != len(names):
        raise ConfigError("every experiment of a sweep needs a name of its own")
    return spec


def sweep(
    spec: dict[str, Any],
    log_file: str | Path,
    samples_dir: str | Path | None = None,
    *,
    resume: bool = False,
    purge: bool = False,
    progress: Callable[[str, dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Runs a sweep's experiments one after another, appending a line to `log_file` (.csv or .json) after each.

    resume  skip names that the log already has
    purge   empty an experiment's cache folders before it runs
    """
    log = _Log(Path(log_file), resume)
    done: list[dict[str, Any]] = []
    for name, settings, notes in experiments(spec, samples_dir):
        if resume and name in log.names:
            continue
        if purge:
            for folder in (settings.cache.cache_dir, settings.cache.fusion_cache_dir):
                if folder:
                    shutil.rmtree(folder, ignore_errors=True)
        summary = run(settings).summary
        line = log_line(name, summary, notes, settings)
        log.append(line)
        done.append(line)
        if progress is not None:
            progress(name, summary)
    return done


def experiments(spec: dict[str, Any], samples_dir: str | Path | None) -> Iterator[tuple[str, RunSettings, str]]:
    """Each experiment's name, settings and notes; all are checked before the first is run."""
    planned: list[tuple[str, RunSettings, str]] = []
    for entry in spec["experiments"]:
        merged = {**spec.get("defaults", {}), **entry}
        run_part, cache_part = split_settings(merged)
        if samples_dir is not None:
            run_part["output"] = str(Path(samples_dir) / entry["name"])
        planned.append(
            (entry["name"], settings_from(merged.get("preset"), run_part, cache_part), merged.get("notes", ""))
        )
    return iter(planned)


def log_line(name: str, summary: dict[str, Any], notes: str, settings: RunSettings) -> dict[str, Any]:
    """One experiment as one line of the log."""
    arms: dict[str, Any] = summary.get("arms", {})

    def of(arm: str, *keys: str) -> Any:
        value: Any = arms.get(arm)
        for key in keys:
            value = None if value is None else value[key]
        return value

    line: dict[str, Any] = {
        "name": name,
        "model": summary["model"],
        "dataset": summary["dataset"],
        "samples": summary["samples"],
        "hit_rate": summary["hit_rate"],
        "agreement": summary.get("agreement"),
        "false_hits": sum(row.get("false_hits") or 0 for row in summary.get("by_level", {}).values()),
        "prefix_hits": summary.get("prefix_hits"),
        "notes": notes,
        "settings": json.dumps(vars(settings.cache), default=str),
    }
    for arm in ("none", "prefix", "cache"):
        line[f"accuracy_{arm}"] = of(arm, "accuracy")
        line[f"computed_{arm}"] = of(arm, "computed_tokens")
        line[f"ttft_p50_{arm}"] = of(arm, "ttft_ms", "p50")
        line[f"ttft_p95_{arm}"] = of(arm, "ttft_ms", "p95")
    line["encoder_runs_none"] = of("none", "encoder_runs")
    line["encoder_runs_cache"] = of("cache", "encoder_runs")
    return {column: line.get(column) for column in COLUMNS}


class _Log:
    """The log file of a sweep; what it already holds, and appending to it."""

    def __init__(self, path: Path, resume: bool) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lines: list[dict[str, Any]] = []
        if path.exists() and resume:
            if path.suffix == ".json":
                self.lines = json.loads(path.read_text())
            else:
                with path.open(newline="") as file:
                    self.lines = list(csv.DictReader(file))
        elif path.exists():
            path.unlink()
        self.names = {str(line["name"]) for line in self.lines}

    def append(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if self.path.suffix == ".json":
            self.path.write_text(json.dumps(self.lines, indent=2) + "\n")
            return
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(line)
