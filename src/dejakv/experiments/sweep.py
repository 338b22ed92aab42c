"""Many runs from one specification: `{"defaults": {...}, "experiments": [{"name": ..., ...}, ...]}`.

An entry may name a `preset`; its own settings override the defaults, and these override the preset. Names are the flags of
`dejakv run` with underscores.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from dejakv.config import SemanticCacheConfig
from dejakv.engines.open import state_folders
from dejakv.errors import ConfigError, DejaKVError
from dejakv.experiments.names import check_names
from dejakv.experiments.output import make_folder
from dejakv.experiments.run import run
from dejakv.experiments.settings import RunSettings, settings_from
from dejakv.experiments.sweep_log import SweepLog, failed_line, log_line
from dejakv.settings import shown
from dejakv.store import purge_folder

NOT_SETTINGS = ("name", "preset", "notes")
SWITCHES = {
    "disable_semantic_cache": ("semantic_text", False),
    "disable_exact_cache": ("exact_text", False),
    "disable_prefix_cache": ("exact_prefix", False),
    "disable_lexical_guard": ("lexical_guard", False),
}


def split_settings(entry: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run settings and cache settings of an entry. Raises ConfigError for an unknown name."""
    cache_names = {item.name for item in fields(SemanticCacheConfig)}
    run_names = {item.name for item in fields(RunSettings)} - {"cache", "implied"}
    run_part: dict[str, Any] = {}
    cache_part: dict[str, Any] = {}
    for name, value in entry.items():
        plain = name.replace("-", "_")
        if plain in NOT_SETTINGS:
            continue
        if plain in SWITCHES:
            if not isinstance(value, bool):
                raise ConfigError(
                    f"sweep entry {shown(entry.get('name'))}: {plain}={shown(value)} is neither true nor false: give one of them"
                )
            target, off = SWITCHES[plain]
            cache_part[target] = off if value else not off
        elif plain in cache_names:
            cache_part[plain] = value
        elif plain in run_names:
            run_part[plain] = value
        else:
            raise ConfigError(
                f"sweep entry {shown(entry.get('name'))} has the unknown setting {name!r}: names are the flags of `dejakv run`"
            )
    return run_part, cache_part


def read_spec(path: str | Path) -> dict[str, Any]:
    """A specification file. Raises ConfigError if it is missing or not JSON; `experiments` checks its content."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the sweep {str(path)!r} ({error}): give a JSON file with --specs") from error


def sweep(
    spec: dict[str, Any],
    log_file: str | Path,
    samples_dir: str | Path | None = None,
    *,
    resume: bool = False,
    purge: bool = False,
    progress: Callable[[str, dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Runs a sweep's experiments one after another, appending a line to `log_file` (.csv or .json) after each. A failed
    experiment gets a line with the reason in `error`, and the next one runs.

    resume  continue a log: its experiments are skipped, except failed ones. Without it the log must not exist
    purge   delete an experiment's cache folders before it runs

    Raises: ConfigError for a wrong specification, log or folder, before the first run; StoreError if a folder to be purged
    is not a store.
    """
    planned = list(experiments(spec, samples_dir))
    if samples_dir is not None:
        make_folder(samples_dir, "--samples-dir")
    log = SweepLog(log_file, resume)
    done: list[dict[str, Any]] = []
    for name, settings, notes in planned:
        if name in log.names:
            continue
        if purge:
            for folder in state_folders(settings.engine, settings.cache):
                purge_folder(folder)
        try:
            summary = run(settings).summary
            line = log_line(name, summary, notes, settings)
        except DejaKVError as error:  # the other experiments still run
            line = failed_line(name, error, notes, settings)
            summary = {"error": line["error"]}
        log.append(line)
        done.append(line)
        if progress is not None:
            progress(name, summary)
    return done


def experiments(spec: Any, samples_dir: str | Path | None) -> Iterator[tuple[str, RunSettings, str]]:
    """Each experiment's name, settings and notes; all are checked before the first one runs.

    Raises: ConfigError naming the experiment and the mistake.
    """
    entries = spec.get("experiments") if isinstance(spec, dict) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(
            "this is not a sweep: give 'experiments', a list of one or more objects, and optionally 'defaults', an object"
        )
    defaults = spec.get("defaults", {})
    if not isinstance(defaults, dict):
        raise ConfigError(f"a sweep's 'defaults' are {shown(defaults)}: give an object, as for an experiment")
    check_names(entry.get("name") for entry in entries)
    return iter([_experiment({**defaults, **entry}, samples_dir) for entry in entries])


def _experiment(merged: dict[str, Any], samples_dir: str | Path | None) -> tuple[str, RunSettings, str]:
    name: str = merged["name"]
    run_part, cache_part = split_settings(merged)
    if samples_dir is not None:
        run_part["output"] = str(Path(samples_dir) / name)
    preset, notes = merged.get("preset"), merged.get("notes", "")
    for key, value in (("preset", preset), ("notes", notes)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"sweep entry {name!r}: {key}={shown(value)} is no text: give a string")
    try:
        return name, settings_from(preset, run_part, cache_part), notes or ""
    except ConfigError as error:
        raise ConfigError(f"sweep entry {name!r}: {error}") from error
