"""The folder of a finished run, read back: settings, summary and rows."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError
from dejakv.experiments.output import SAMPLES, SETTINGS, SUMMARY, read_object
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.summary import Row
from dejakv.settings import from_mapping

_PREFIX = "cache."


def finished_settings(folder: Path) -> RunSettings:
    """The settings of a run. Its output folder is left out: nobody writes there again by accident.

    Raises: ConfigError for a folder without a run, for a stopped run, and for settings of another version.
    """
    finished_summary(folder)
    told = read_object(folder / SETTINGS)
    if not told:
        raise ConfigError(
            f"{str(folder)!r} has no readable {SETTINGS}, so the settings of its run are unknown: give the folder of a live run"
        )
    told.pop("dejakv_version", None)
    try:
        return settings_of({**told, "output": None})
    except ConfigError as error:
        raise ConfigError(
            f"{folder / SETTINGS} cannot be used: {error} (was it written by another version?)"
        ) from error


def settings_of(named: Mapping[str, Any]) -> RunSettings:
    """The settings whose `RunSettings.named` this is, also as read from JSON. Raises: ConfigError."""
    cache = {name.removeprefix(_PREFIX): value for name, value in named.items() if name.startswith(_PREFIX)}
    plain = {name: value for name, value in named.items() if not name.startswith(_PREFIX)}
    return from_mapping(RunSettings, {**plain, "cache": SemanticCacheConfig.from_dict(cache)}, "a run's settings")


def finished_summary(folder: Path) -> dict[str, Any]:
    """`summary.json` of a run. Raises: ConfigError for a folder without a run and for a stopped run."""
    if not folder.is_dir():
        raise ConfigError(f"no folder {str(folder)!r}: give the --output folder of a run")
    summary = read_object(folder / SUMMARY)
    if not summary and (folder / SAMPLES).exists() and (folder / SETTINGS).exists():
        raise ConfigError(f"the run in {str(folder)!r} was stopped before its end: finish it with dejakv run --resume")
    if "stopped_before" in summary:
        raise ConfigError(
            f"the run in {str(folder)!r} was stopped after {summary.get('samples', 0) + len(summary.get('not_run', ()))} of {summary['stopped_before']} samples: "
            "finish it with dejakv run --resume"
        )
    if "dejakv_version" not in summary:
        raise ConfigError(f"{str(folder)!r} has no {SUMMARY} of a run: give the --output folder of a run")
    return summary


def finished_rows(folder: Path) -> tuple[Row, ...]:
    """The rows of a live run. Raises: ConfigError if `samples.jsonl` is missing or of another kind."""
    path = folder / SAMPLES
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return tuple([Row.from_dict(json.loads(line)) for line in lines])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} cannot be read as the samples of a live run ({type(error).__name__}: {error}): give a run's own folder"
        ) from error
