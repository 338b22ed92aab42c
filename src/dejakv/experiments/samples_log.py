"""The files of a run: written sample by sample, continued by `--resume`, read at the end."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dejakv import __version__
from dejakv.datasets.base import Sample
from dejakv.errors import ConfigError, OutputError
from dejakv.experiments.output import (
    SAMPLES,
    SETTINGS,
    SIGNED,
    SUMMARY,
    read_json_or_empty,
    replace_file,
    run_folder,
)
from dejakv.experiments.settings import RunSettings, settings_of
from dejakv.experiments.summary import SampleRow

_FREE = ("output", "implied", SIGNED)
"""Settings that may differ between a run and its resumption, or follow from others."""


REMEDY = "give another --output, or remove it first"


class SamplesLog:
    """Log of one run in a folder; each line is complete on disk before the next sample starts.

    Parameters
    ----------
    folder : Path
        Output folder of the run.
    named_settings : mapping
        Settings of the run, by name (`RunSettings.named`).
    chosen : sequence of Sample
        The samples of the run, in its order.

    Attributes
    ----------
    rows : list[SampleRow]
        Samples that an earlier, stopped run in this folder finished.

    Raises
    ------
    ConfigError
        If the folder cannot be written, or has a run with other settings or samples.
    """

    def __init__(
        self, folder: Path, named_settings: Mapping[str, Any], chosen: Sequence[Sample]
    ) -> None:
        self._path = run_folder(folder) / SAMPLES
        try:
            continues = read_json_or_empty(folder / SETTINGS) and _has_measured(self._path)
            self.rows = self._finished(folder, named_settings, chosen) if continues else []
            replace_file(
                folder / SETTINGS,
                json.dumps({**named_settings, SIGNED: __version__}, indent=2, default=str) + "\n",
                "--output",
            )

            if not self.rows:
                replace_file(self._path, "", "--output")
            # Unbuffered: what a full disk did not take is not tried again on closing.
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"--output {str(folder)!r} cannot be written ({error.strerror}): give a folder you"
                " may write to"
            ) from error

    def append(self, row: SampleRow) -> None:
        """Write a finished sample.

        Raises
        ------
        OutputError
            If the file cannot be written, as on a full disk. A resumed run drops the partial line.
        """
        unwritten = (json.dumps(row.as_dict()) + "\n").encode()
        try:
            while unwritten:
                # An unbuffered write may take only a part; a full disk raises at the next one.
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            raise OutputError(
                f"{self._path} cannot be written ({error.strerror}), and the run stops: free some"
                " space on its disk and add --resume to the same command to continue"
            ) from error

    def close(self) -> None:
        """Close the file; nothing can be appended afterwards."""
        self._file.close()

    def _finished(
        self, folder: Path, named_settings: Mapping[str, Any], chosen: Sequence[Sample]
    ) -> list[SampleRow]:
        check_same(folder, named_settings)
        rows: list[SampleRow] = []
        complete_bytes = 0

        with self._path.open("rb") as file:
            for line in file:
                # A complete sample without a line end would share a line with the next one.
                if not line.endswith(b"\n"):
                    break
                try:
                    row = SampleRow.from_dict(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError):
                    # A partial line, from a killed run.
                    break
                if len(rows) >= len(chosen) or row.sample_id != chosen[len(rows)].id:
                    raise ConfigError(
                        f"{self._path} has sample {row.sample_id!r} where this run has another:"
                        " give the same data set, or another --output"
                    )
                rows.append(row)
                complete_bytes += len(line)

        # Else the next row would continue the partial line of a killed run.
        os.truncate(self._path, complete_bytes)
        return rows


def _has_measured(path: Path) -> bool:
    """Tell whether a run's samples hold one that is finished and ran: nothing else can be lost."""
    try:
        with path.open("rb") as lines:
            return any(line.endswith(b"\n") and not _could_not_run(line) for line in lines)
    except FileNotFoundError:
        return False


def _could_not_run(line: bytes) -> bool:
    try:
        return bool(json.loads(line)["error"])
    except (ValueError, KeyError, TypeError):
        return False


def check_same(folder: Path, named_settings: Mapping[str, Any]) -> None:
    """Raise a ConfigError if the run in the folder had other settings."""
    if changed := changed_settings(read_json_or_empty(folder / SETTINGS), named_settings):
        raise ConfigError(
            f"the run in {str(folder)!r} had other settings ({', '.join(changed)}): {REMEDY}"
        )


def changed_settings(before: Mapping[str, Any], named_settings: Mapping[str, Any]) -> list[str]:
    """Return the names of settings, as `settings.json` has them, that differ from a run's own.

    The output folder, and what follows from other settings, may differ.
    """
    # Through JSON, as the others come from a file, where tuples are lists.
    now: dict[str, Any] = json.loads(json.dumps(dict(named_settings), default=str))
    return sorted(
        name for name in {*before, *now} - set(_FREE) if before.get(name) != now.get(name)
    )


def finished_settings(folder: Path) -> RunSettings:
    """Return the settings of a run, without its output folder: nobody writes there by accident.

    Raises
    ------
    ConfigError
        For a folder without a run, for a stopped run, and for settings of another version.
    """
    finished_summary(folder)
    named_settings = read_json_or_empty(folder / SETTINGS)
    if not named_settings:
        raise ConfigError(
            f"{str(folder)!r} has no readable {SETTINGS}, so the settings of its run are unknown:"
            " give the folder of a live run"
        )

    # The signature of the file, which is no setting.
    named_settings.pop("dejakv_version", None)

    try:
        return settings_of({**named_settings, "output": None})
    except ConfigError as error:
        raise ConfigError(
            f"{folder / SETTINGS} cannot be used: {error} (was it written by another version?)"
        ) from error


def finished_summary(folder: Path) -> dict[str, Any]:
    """Return `summary.json` of a run.

    Raises
    ------
    ConfigError
        For a folder without a run and for a stopped run.
    """
    if not folder.is_dir():
        raise ConfigError(f"no folder {str(folder)!r}: give the --output folder of a run")
    summary = read_json_or_empty(folder / SUMMARY)
    if (
        not summary and (folder / SAMPLES).exists() and (folder / SETTINGS).exists()
    ) or "stopped_before" in summary:
        raise ConfigError(
            f"the run in {str(folder)!r} was stopped before its end: finish it with dejakv run"
            " --resume"
        )
    if "dejakv_version" not in summary:
        raise ConfigError(
            f"{str(folder)!r} has no {SUMMARY} of a run: give the --output folder of a run"
        )

    return summary


def finished_rows(folder: Path) -> tuple[SampleRow, ...]:
    """Return the rows of a live run.

    Raises
    ------
    ConfigError
        If `samples.jsonl` is missing or of another kind.
    """
    path = folder / SAMPLES
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return tuple([SampleRow.from_dict(json.loads(line)) for line in lines])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} cannot be read as the samples of a live run ({type(error).__name__}: {error}):"
            " give a run's own folder"
        ) from error


def earlier_run(
    settings: RunSettings, chosen: Sequence[Sample], *, resume: bool
) -> tuple[dict[str, Any], tuple[SampleRow, ...]] | None:
    """Return the finished run of these settings and samples that is in the output folder.

    Returns
    -------
    tuple of dict and rows, or None
        Summary and rows. None if nothing is lost there: no run, one without a finished sample, a
        dry run, which measures nothing, and with `resume` a stopped one.

    Raises
    ------
    ConfigError
        For another run or a stopped one, with the remedy.
    """
    folder = Path(settings.output or "")
    summary, path = read_json_or_empty(folder / SUMMARY), folder / SAMPLES
    if settings.output is None or not _has_measured(path):
        return None
    # A dry run leaves no settings.
    if not read_json_or_empty(folder / SETTINGS):
        if resume and "cache_mode" not in summary:
            raise ConfigError(
                f"--resume: {str(folder)!r} has no readable {SETTINGS} of a stopped run: run"
                " without --resume"
            )
        return None
    check_same(folder, settings.named())
    if "samples" not in summary or "stopped_before" in summary:
        if resume:
            return None
        raise ConfigError(
            f"--output {str(folder)!r} has a run that was stopped: add --resume to continue it,"
            f" {REMEDY}"
        )

    rows = finished_rows(folder)
    if [(row.sample_id, row.question, row.answer) for row in rows] != [
        (o.id, o.question, o.answer) for o in chosen
    ]:
        raise ConfigError(f"--output {str(folder)!r} has a run over other samples: {REMEDY}")

    return summary, rows
