"""The log of a sweep: one line for each run, in a .csv file, and as a table."""

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
from dejakv.experiments.reports.plain_words import figure, share
from dejakv.experiments.samples_log import changed_settings
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.table import Block, TextTable
from dejakv.settings import display

COLUMNS: tuple[str, ...] = (
    "name", "model", "dtype", "dataset", "samples", "hit_rate", "agreement", "judged_hits",
    "false_hits", "prefix_hits", "share_prefix", "share_anywhere",
    "accuracy_none", "accuracy_prefix", "accuracy_cache",
    "computed_none", "computed_prefix", "computed_cache", "encoder_runs_none", "encoder_runs_cache",
    "ttft_p50_none", "ttft_p50_prefix", "ttft_p50_cache",
    "ttft_p95_none", "ttft_p95_prefix", "ttft_p95_cache",
    "notes", "settings", "error",
)  # fmt: skip


# A spreadsheet may run a cell that begins like this; a plain number with a sign is harmless.
_FORMULA = re.compile(r"'*\s*(?!-?[\d.]+(e[+-]?\d+)?$)[=+@\t\r\n-]")


@contextmanager
def open_log(path: str | Path, resume: bool) -> Iterator["SweepLog"]:
    """Open a log that no other process can open meanwhile (`.NAME.lock` beside it).

    Raises
    ------
    ConfigError
        If the name does not end with .csv, or the file exists and is not to be resumed, is not the
        log of a sweep, cannot be written, or is in use.
    """
    path = Path(path)
    if path.suffix != ".csv":
        raise ConfigError(
            f"--log-file {str(path)!r}: a sweep's log is CSV: give a name that ends with .csv"
        )
    make_folder(path.parent, "--log-file")
    exists = os.path.lexists(path)
    if exists and not resume:
        raise ConfigError(
            f"--log-file {str(path)!r} exists and is not overwritten: continue it with --resume, or"
            " give another name"
        )

    busy = (
        f"--log-file {display(str(path))} is being written by another sweep: wait for it, or give"
        " another name"
    )

    # Not of the log itself: that file is replaced, and its lock would go with the old one.
    with locked(path.with_name(f".{path.name}.lock"), "--log-file", busy):
        yield SweepLog(path, read_log(path) if exists else [])


@dataclass
class SweepLog:
    """Lines of a log. In the file each line is as a whole or not at all, at any time."""

    path: Path
    lines: list[dict[str, Any]]

    def finished(self, name: str, settings: RunSettings) -> bool:
        """Tell whether an experiment has run; a ConfigError tells that it had other settings."""
        line = next(
            (line for line in self.lines if line["name"] == name and not line["error"]), None
        )
        if line is None:
            return False
        if changed := changed_settings(json.loads(line["settings"] or "{}"), settings.named()):
            raise ConfigError(
                f"--resume: {display(name)} has run with other settings ({', '.join(changed)}):"
                " give it another name, or another --log-file"
            )

        return True

    def append(self, line: dict[str, Any]) -> None:
        """Add the line of a run, which replaces an earlier one of its name, and write the file.

        Raises
        ------
        ConfigError
            If the file cannot be written.
        """
        self.lines = [
            *(earlier_line for earlier_line in self.lines if earlier_line["name"] != line["name"]),
            line,
        ]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows(
            {name: _guard_cell(value) for name, value in line.items()} for line in self.lines
        )

        # The whole file anew: a crash leaves the old one, and no half line.
        replace_file(self.path, text.getvalue(), "--log-file")


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a sweep's log, all values as strings.

    Raises
    ------
    ConfigError
        If the file cannot be read, has other columns than `COLUMNS`, or has two rows of one name.
    """
    try:
        rows = csv.DictReader(io.StringIO(Path(path).read_text(encoding="utf-8"), newline=""))
        if tuple(rows.fieldnames or ()) != COLUMNS:
            raise ValueError("other columns than this version writes")
        lines: list[dict[str, Any]] = list(rows)
        for line in lines:
            if set(line) != set(COLUMNS):
                raise ValueError("other columns than this version writes")
            line |= {name: _unguard_cell(value) for name, value in line.items()}
            # A damaged cell must be found now and not amid the sweep.
            json.loads(line["settings"] or "{}")
        if len({line["name"] for line in lines}) < len(lines):
            raise ValueError("two rows have one name")
    except (OSError, ValueError, TypeError, RecursionError, csv.Error) as error:
        raise ConfigError(
            f"{display(str(path))} is no log of a sweep ({error}): give the --log-file of a sweep"
            " of this version"
        ) from error

    return lines


def _guard_cell(value: Any) -> Any:
    """Return a cell that a spreadsheet shows as text.

    One that begins as a formula does gets an apostrophe, which `_unguard_cell` takes away.
    """
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def _unguard_cell(cell: str) -> str:
    return cell[1:] if cell[:1] == "'" and _FORMULA.match(cell[1:]) else cell


def log_line(
    name: str, summary: Mapping[str, Any] | None, notes: str, settings: RunSettings, error: str = ""
) -> dict[str, Any]:
    """Return a line of the log; figures that were not measured are None, an empty cell.

    Without a summary the experiment has failed, with an `error`.
    """
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


def sweep_blocks(lines: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Return a table of the experiments, an explanation of its columns, and the errors."""
    return [
        sheet(lines),
        (
            "agreement: answers equal to those of full computation; false hits: with another"
            " answer; computed: share of the prompts' tokens that the cache computed; TTFT: median"
            " of the cache, and over that of prefix caching"
        ),
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
    """Return a table with a row for each experiment, and the notes, where there are any."""
    noted = any(line["notes"] for line in lines)
    rows = [
        [
            str(line["name"]), str(line["dtype"] or "-"),
            "failed" if line["error"] else share(number(line["hit_rate"])),
            share(number(line["agreement"])), figure(number(line["false_hits"])),
            share(ratio_of(line, "computed_cache", "computed_none")),
            figure(number(line["ttft_p50_cache"])),
            share(ratio_of(line, "ttft_p50_cache", "ttft_p50_prefix")),
            *([line["notes"] or ""] if noted else []),
        ]
        for line in lines
    ]  # fmt: skip

    return TextTable("sweep", (*COLUMNS_SHOWN, "notes") if noted else COLUMNS_SHOWN, rows)


def number(value: Any) -> float | None:
    """Return a figure of a row, which a CSV gives as text; None if it was not measured."""
    return None if value in (None, "") else float(value)


def ratio_of(
    row: Mapping[str, Any], numerator_column: str, denominator_column: str
) -> float | None:
    """Return the ratio of two figures of a row; None if one is missing or the denominator is 0."""
    numerator, denominator = number(row[numerator_column]), number(row[denominator_column])
    return numerator / denominator if numerator is not None and denominator else None
