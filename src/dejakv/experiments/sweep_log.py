"""The log of a sweep: one line a run, in a .csv file of its own, and as a table for terminal and report."""

import csv
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dejakv.errors import ConfigError
from dejakv.experiments.output import locked, make_folder, replace_file
from dejakv.experiments.plain_words import figure, share
from dejakv.experiments.samples_log import changed_settings
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.table import Block, TextTable
from dejakv.settings import shown

COLUMNS: tuple[str, ...] = (
    "name", "model", "dtype", "dataset", "samples", "hit_rate", "agreement", "judged_hits", "false_hits", "prefix_hits", "share_prefix", "share_anywhere",
    "accuracy_none", "accuracy_prefix", "accuracy_cache",
    "computed_none", "computed_prefix", "computed_cache", "encoder_runs_none", "encoder_runs_cache",
    "ttft_p50_none", "ttft_p50_prefix", "ttft_p50_cache", "ttft_p95_none", "ttft_p95_prefix", "ttft_p95_cache",
    "notes", "settings", "error",
)  # fmt: skip


_FORMULA = re.compile(r"'*\s*(?!-?[\d.]+(e[+-]?\d+)?$)[=+@\t\r\n-]")


@contextmanager
def open_log(path: str | Path, resume: bool) -> Iterator["SweepLog"]:
    """A log that no other process can open meanwhile (`.NAME.lock` beside it).

    Raises: ConfigError if the file exists and is not to be resumed, is not the log of a sweep, cannot be written, or is in use.
    """
    path = Path(path)
    if path.suffix != ".csv":
        raise ConfigError(f"--log-file {str(path)!r}: a sweep's log is CSV: give a name that ends with .csv")
    make_folder(path.parent, "--log-file")
    exists = os.path.lexists(path)
    if exists and not resume:
        raise ConfigError(
            f"--log-file {str(path)!r} exists and is not overwritten: continue it with --resume, or give another name"
        )

    busy = f"--log-file {shown(str(path))} is being written by another sweep: wait for it, or give another name"
    # Not of the log itself: that file is replaced, and its lock would go with the old one.
    with locked(path.with_name(f".{path.name}.lock"), "--log-file", busy):
        yield SweepLog(path, logged(path) if exists else [])


@dataclass
class SweepLog:
    """The lines of a log. The file is complete at any time: each line is in it as a whole or not at all."""

    path: Path
    lines: list[dict[str, Any]]

    def finished(self, name: str, settings: RunSettings) -> bool:
        """Whether an experiment has run. Raises: ConfigError if it had other settings."""
        line = next((line for line in self.lines if line["name"] == name and not line["error"]), None)
        if line is None:
            return False
        if changed := changed_settings(json.loads(line["settings"] or "{}"), settings.named()):
            raise ConfigError(
                f"--resume: {shown(name)} has run with other settings ({', '.join(changed)}): give it another name, or "
                "another --log-file"
            )

        return True

    def append(self, line: dict[str, Any]) -> None:
        """Adds the line of a run, and replaces an earlier failed one."""
        self.lines = [*(earlier_line for earlier_line in self.lines if earlier_line["name"] != line["name"]), line]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows({name: _plain(value) for name, value in line.items()} for line in self.lines)
        # The whole file anew: a crash leaves the old one, and no half line.
        replace_file(self.path, text.getvalue(), "--log-file")


def logged(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a log; figures are texts. Raises: ConfigError for what is no log of this version."""
    try:
        rows = csv.DictReader(io.StringIO(Path(path).read_text(encoding="utf-8"), newline=""))
        if tuple(rows.fieldnames or ()) != COLUMNS:
            raise ValueError("other columns than this version writes")
        lines: list[dict[str, Any]] = list(rows)
        for line in lines:
            if set(line) != set(COLUMNS):
                raise ValueError("other columns than this version writes")
            line |= {name: _read(value) for name, value in line.items()}
            # A damaged cell must be found now and not amid the sweep.
            json.loads(line["settings"] or "{}")
        if len({line["name"] for line in lines}) < len(lines):
            raise ValueError("two rows have one name")
    except (OSError, ValueError, TypeError, RecursionError, csv.Error) as error:
        raise ConfigError(
            f"{shown(str(path))} is no log of a sweep ({error}): give the --log-file of a sweep of this version"
        ) from error

    return lines


def _plain(value: Any) -> Any:
    """A cell that a spreadsheet shows as text: one that begins as a formula does gets an apostrophe, which `_read` takes away."""
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def _read(cell: str) -> str:
    return cell[1:] if cell[:1] == "'" and _FORMULA.match(cell[1:]) else cell


def log_line(
    name: str, summary: Mapping[str, Any] | None, notes: str, settings: RunSettings, error: str = ""
) -> dict[str, Any]:
    """A line of the log. Unmeasured figures are None, an empty cell. Without a summary the experiment has failed, with an `error`."""
    setting_columns = {
        "name": name,
        "model": settings.model,
        "dataset": settings.dataset,
        "notes": notes,
        "settings": json.dumps({**settings.named(), "output": None}, default=str, sort_keys=True),
    }
    if summary is None:
        return {**dict.fromkeys(COLUMNS), **setting_columns, "error": error}

    arms: dict[str, Any] = summary.get("arms", {})
    levels = list(summary.get("by_level", {}).values())
    judged = sum(row["judged"] for row in levels)
    wrong = sum(row["false_hits"] or 0 for row in levels) if judged else None
    line = {**summary, **setting_columns, "judged_hits": judged, "false_hits": wrong}
    for arm, figures in arms.items():
        arm_columns = {"accuracy": figures["accuracy"], "computed": figures["computed_tokens"]}
        arm_columns |= {"encoder_runs": figures["encoder_runs"]}
        arm_columns |= {f"ttft_{name}": figures["ttft_ms"][name] for name in ("p50", "p95")}
        line |= {f"{name}_{arm}": value for name, value in arm_columns.items()}

    return {column: line.get(column) for column in COLUMNS}


def parts(lines: Sequence[Mapping[str, Any]]) -> list[Block]:
    """A table of the experiments, an explanation of its columns, and the errors of failed ones."""
    return [
        sheet(lines),
        "agreement: answers equal to those of full computation; false hits: with another answer; computed: share of the prompts' tokens "
        "that the cache computed; TTFT: median of the cache, and over that of prefix caching",
        *(f"{line['name']} failed: {line['error']}" for line in lines if line["error"]),
    ]


COLUMNS_SHOWN = (
    "experiment",
    "dtype",
    "hit rate",
    "agreement",
    "false hits",
    "computed",
    "TTFT p50, ms",
    "of prefix caching's",
)


def sheet(lines: Sequence[Mapping[str, Any]]) -> TextTable:
    """A row an experiment, for a terminal and for the report; the notes too, where there are any."""
    noted = any(line["notes"] for line in lines)
    rows = [
        [
            str(line["name"]), str(line["dtype"] or "-"), "failed" if line["error"] else share(number(line["hit_rate"])), share(number(line["agreement"])),
            figure(number(line["false_hits"])), share(part(line, "computed_cache", "computed_none")),
            figure(number(line["ttft_p50_cache"])), share(part(line, "ttft_p50_cache", "ttft_p50_prefix")),
            *([line["notes"] or ""] if noted else []),
        ]
        for line in lines
    ]  # fmt: skip

    return TextTable("sweep", (*COLUMNS_SHOWN, "notes") if noted else COLUMNS_SHOWN, rows)


def number(value: Any) -> float | None:
    """A figure of a row, which a CSV gives as text; None if it was not measured."""
    return None if value in (None, "") else float(value)


def part(row: Mapping[str, Any], numerator_column: str, denominator_column: str) -> float | None:
    """Ratio of two figures of a row; None if one is missing."""
    numerator, denominator = number(row[numerator_column]), number(row[denominator_column])
    return numerator / denominator if numerator is not None and denominator else None
