"""The log of a sweep: one line a run, in a .csv or .json file of its own."""

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dejakv.errors import ConfigError
from dejakv.experiments.output import make_folder, replace_file
from dejakv.experiments.settings import RunSettings
from dejakv.settings import shown

COLUMNS: tuple[str, ...] = (
    "name", "model", "dataset", "samples", "hit_rate", "agreement", "judged_hits", "false_hits", "prefix_hits",
    "accuracy_none", "accuracy_prefix", "accuracy_cache",
    "computed_none", "computed_prefix", "computed_cache", "encoder_runs_none", "encoder_runs_cache",
    "ttft_p50_none", "ttft_p50_prefix", "ttft_p50_cache", "ttft_p95_none", "ttft_p95_prefix", "ttft_p95_cache",
    "notes", "settings", "error",
)  # fmt: skip


class SweepLog:
    """The lines of a log (`names`: the finished runs). The file is complete at any time: each line is in it as a whole or not at all.

    Raises: ConfigError if the file exists and is not to be resumed, is not the log of a sweep, or cannot be written.
    """

    def __init__(self, path: str | Path, resume: bool) -> None:
        self.path = Path(path)
        if self.path.suffix not in (".csv", ".json"):
            raise ConfigError(f"--log-file {str(path)!r}: give a name that ends with .csv or .json")
        make_folder(self.path.parent, "--log-file")
        self.lines: list[dict[str, Any]] = []
        if _exists(self.path):
            if not resume:
                raise ConfigError(
                    f"--log-file {str(path)!r} exists and is not overwritten: continue it with --resume, or give another name"
                )
            self.lines = self._read()
        self.names = {str(line["name"]) for line in self.lines if not line["error"]}

    def append(self, line: dict[str, Any]) -> None:
        """Adds the line of a run, and replaces an earlier failed one."""
        self.lines = [held for held in self.lines if held["name"] != line["name"]]
        self.lines.append(line)
        if self.path.suffix == ".json":
            text = json.dumps(self.lines, indent=2) + "\n"
        else:
            table = io.StringIO(newline="")
            writer = csv.DictWriter(table, COLUMNS)
            writer.writeheader()
            writer.writerows(self.lines)
            text = table.getvalue()
        replace_file(self.path, text, "--log-file")

    def _read(self) -> list[dict[str, Any]]:
        try:
            text = self.path.read_text(encoding="utf-8")
            found: Any = json.loads(text) if self.path.suffix == ".json" else _table(text)
        except (OSError, ValueError, RecursionError, csv.Error) as error:
            raise self._foreign(str(error)) from error
        if not isinstance(found, list):
            raise self._foreign("no list")
        for line in found:
            if not isinstance(line, dict) or set(line) != set(COLUMNS):
                raise self._foreign("other columns than this version writes")
        return found

    def _foreign(self, why: str) -> ConfigError:
        return ConfigError(f"--resume: {str(self.path)!r} is no log of a sweep ({why}): give another --log-file")


def failed_line(name: str, error: Exception, notes: str, settings: RunSettings) -> dict[str, Any]:
    """An experiment that could not be run: its settings, and the reason in `error`."""
    line: dict[str, Any] = dict.fromkeys(COLUMNS)
    values = json.dumps(vars(settings.cache), default=str)
    told = {"name": name, "model": settings.model, "dataset": settings.dataset, "notes": notes, "settings": values}
    return line | told | {"error": " ".join(str(error).split())}


def _exists(path: Path) -> bool:
    """Whether the path exists, even as a dangling link."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise ConfigError(f"--log-file {shown(str(path))} cannot be used ({error}): give another name") from error
    return True


def _table(text: str) -> list[dict[str, Any]]:
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    if rows.fieldnames is None:
        raise ValueError("it is empty")
    if tuple(rows.fieldnames) != COLUMNS:
        raise ValueError("other columns than this version writes")
    return list(rows)


def log_line(name: str, summary: Mapping[str, Any], notes: str, settings: RunSettings) -> dict[str, Any]:
    """One experiment as one line of the log. Figures that were not measured are None, an empty cell."""
    arms: dict[str, Any] = summary.get("arms", {})

    def of(arm: str, *keys: str) -> Any:
        value: Any = arms.get(arm)
        for key in keys:
            value = None if value is None else value[key]
        return value

    levels = list(summary.get("by_level", {}).values())
    judged = sum(row["judged"] for row in levels)
    line: dict[str, Any] = {
        "name": name,
        "model": summary["model"],
        "dataset": summary["dataset"],
        "samples": summary["samples"],
        "hit_rate": summary["hit_rate"],
        "agreement": summary.get("agreement"),
        "judged_hits": judged,
        "false_hits": sum(row["false_hits"] or 0 for row in levels) if judged else None,
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
