"""Many runs from one specification (`sweep_spec`), a row of a log each (`sweep_log`), here or in several processes (`sweep_jobs`).

An experiment may name a `preset`; its own settings override the defaults, and these override the preset. Names are the flags of
`dejakv run` with underscores (`keys`).
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dejakv.engines.open import state_folders
from dejakv.errors import ConfigError
from dejakv.experiments.keys import split_settings
from dejakv.experiments.names import check_names
from dejakv.experiments.output import make_folder
from dejakv.experiments.settings import settings_from
from dejakv.experiments.sweep_jobs import Experiment, Here, Processes, Runner
from dejakv.experiments.sweep_log import SweepLog, failed_line, log_line
from dejakv.experiments.sweep_spec import entries, read_spec
from dejakv.experiments.watch import Silent, Watch
from dejakv.settings import shown
from dejakv.store import purge_folder

__all__ = ["Experiment", "experiments", "read_spec", "sweep"]


def sweep(
    spec: dict[str, Any],
    log_file: str | Path,
    samples_dir: str | Path | None = None,
    *,
    resume: bool = False,
    purge: bool = False,
    jobs: int = 1,
    progress: Callable[[str, dict[str, Any]], None] | None = None,
    watch: Watch | None = None,
) -> list[dict[str, Any]]:
    """Runs a sweep's experiments, appending a line to `log_file` (.csv or .json) after each. A failed experiment gets a line with
    the reason in `error`, and the others run.

    resume  continue a log: its experiments are skipped, except failed ones. Without it the log must not exist
    purge   delete an experiment's cache folders before it runs
    jobs    how many run at a time; more than one run in processes of their own
    progress, watch  told of each result, and of the work in between

    Raises: ConfigError for a wrong specification, log or folder, before the first run; StoreError if a folder to be purged
    is not a store.
    """
    planned = list(experiments(spec, samples_dir))
    if jobs < 1:
        raise ConfigError(f"--jobs {jobs}: give 1 or more")
    if jobs > 1:
        _check_folders(planned)
    if samples_dir is not None:
        make_folder(samples_dir, "--samples-dir")
    with SweepLog(log_file, resume) as log:
        log.check_same(planned)
        waiting = [experiment for experiment in planned if experiment.name not in log.names]
        runner = Here(watch or Silent()) if jobs == 1 else Processes(jobs, watch or Silent())
        return _run_all(waiting, runner, log, purge, progress)


def _run_all(
    planned: Sequence[Experiment], runner: Runner, log: SweepLog, purge: bool,
    progress: Callable[[str, dict[str, Any]], None] | None,
) -> list[dict[str, Any]]:  # fmt: skip
    def before(experiment: Experiment) -> None:
        for folder in state_folders(experiment.settings.engine, experiment.settings.cache) if purge else ():
            purge_folder(folder)

    lines: list[dict[str, Any]] = []
    for (name, settings, notes), summary, error in runner.results(planned, before):
        line = (
            failed_line(name, error, notes, settings) if summary is None else log_line(name, summary, notes, settings)
        )
        log.append(line)
        lines.append(line)
        if progress is not None:
            progress(name, {"error": error} if summary is None else summary)
    return lines


def experiments(spec: Any, samples_dir: str | Path | None) -> Iterator[Experiment]:
    """Each experiment's name, settings and notes; all are checked before the first one runs.

    Raises: ConfigError naming the experiment and the mistake.
    """
    found = entries(spec)
    check_names(entry.get("name") for entry in found)
    return iter([_experiment(entry, samples_dir) for entry in found])


def _experiment(merged: dict[str, Any], samples_dir: str | Path | None) -> Experiment:
    name: str = merged["name"]
    run_part, cache_part = split_settings(merged)
    if samples_dir is not None:
        run_part["output"] = str(Path(samples_dir) / name)
    preset, notes = merged.get("preset"), merged.get("notes", "")
    for key, value in (("preset", preset), ("notes", notes)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"sweep entry {name!r}: {key}={shown(value)} is no text: give a string")
    try:
        return Experiment(name, settings_from(preset, run_part, cache_part), notes or "")
    except ConfigError as error:
        raise ConfigError(f"sweep entry {name!r}: {error}") from error


def _check_folders(planned: Sequence[Experiment]) -> None:
    """Raises: ConfigError if two experiments that may run at a time keep state in one folder."""
    owners: dict[str, str] = {}
    for name, settings, _ in planned:
        for folder in state_folders(settings.engine, settings.cache):
            other = owners.setdefault(str(Path(folder).resolve()), name)
            if other != name:
                raise ConfigError(
                    f"{other!r} and {name!r} have one cache folder, {folder!r}: give each its own, or --jobs 1"
                )
