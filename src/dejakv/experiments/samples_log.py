"""`samples.jsonl` of a run: a line for each finished sample; `--resume` reads the lines of a stopped run."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dejakv.datasets.base import Sample
from dejakv.errors import ConfigError, OutputError
from dejakv.experiments.output import SAMPLES, SETTINGS, SIGNED, read_object, replace_file, run_folder, write_settings
from dejakv.experiments.summary import Row

_FREE = ("output", "implied", SIGNED)
"""Settings that may differ between a run and its resumption, or follow from others."""


class SamplesLog:
    """The log of one run in a folder. Each line is complete on disk before the next sample starts.

    told  settings of the run, by name (`RunSettings.named`)
    rows  the samples that an earlier, stopped run of the same settings finished; empty unless `resume`

    Raises: ConfigError if the folder cannot be written, or if `resume` finds a run with other settings.
    """

    def __init__(
        self, folder: Path, told: Mapping[str, Any], chosen: Sequence[Sample], *, resume: bool = False
    ) -> None:
        self._path = run_folder(folder) / SAMPLES
        try:
            self.rows = self._finished(folder, told, chosen) if resume else []
            write_settings(folder, dict(told))
            if not self.rows:
                replace_file(self._path, "", "--output")
            self._file = self._path.open(
                "ab", buffering=0
            )  # what a full disk did not take is not tried again on closing
        except OSError as error:
            raise ConfigError(
                f"--output {str(folder)!r} cannot be written ({error.strerror}): give a folder you may write to"
            ) from error

    def append(self, row: Row) -> None:
        """Writes a finished sample. Raises: OutputError if the disk is full; a part of the line is dropped by `resume`."""
        left = (json.dumps(row.as_dict()) + "\n").encode()
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise OutputError(
                f"{self._path} cannot be written ({error.strerror}), and the run stops: free some space on its disk and add --resume "
                "to the same command to continue"
            ) from error

    def close(self) -> None:
        """Closes the file; nothing can be appended afterwards."""
        self._file.close()

    def _finished(self, folder: Path, told: Mapping[str, Any], chosen: Sequence[Sample]) -> list[Row]:
        if not self._path.exists():
            return []
        check_same(folder, told)
        rows: list[Row] = []
        whole = 0
        with self._path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break  # a complete sample without a line end would share a line with the next one
                try:
                    row = Row.from_dict(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError):
                    break  # a partial line, from a killed run
                if len(rows) >= len(chosen) or row.sample_id != chosen[len(rows)].id:
                    raise ConfigError(
                        f"{self._path} has sample {row.sample_id!r} where this run has another:"
                        " give the same data set, or another --output"
                    )
                rows.append(row)
                whole += len(line)
        os.truncate(self._path, whole)
        return rows


def check_same(folder: Path, told: Mapping[str, Any]) -> None:
    """Raises: ConfigError if the run in the folder had other settings, or they are unknown."""
    before = read_object(folder / SETTINGS)
    if not before:
        raise ConfigError(
            f"--resume: {folder} has no readable {SETTINGS}, so the settings of the stopped run are unknown:"
            " run without --resume"
        )
    if changed := changed_settings(before, told):
        raise ConfigError(
            f"the run in {folder} had other settings ({', '.join(changed)}): give the same ones, or another --output"
        )


def changed_settings(before: Mapping[str, Any], told: Mapping[str, Any]) -> list[str]:
    """Names of the settings, as `settings.json` has them, that differ from a run's own."""
    now: dict[str, Any] = json.loads(json.dumps(dict(told), default=str))
    return sorted(name for name in {*before, *now} - set(_FREE) if before.get(name) != now.get(name))
