"""A run whose output folder has one already: what was measured is not lost, and not measured again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dejakv import __version__
from dejakv.datasets.base import Sample
from dejakv.errors import ConfigError
from dejakv.experiments.finished_run import finished_rows
from dejakv.experiments.output import SAMPLES, SETTINGS, SIGNED, SUMMARY, read_object
from dejakv.experiments.samples_log import changed_settings
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.summary import Row

REMEDY = "give another --output, or remove it first"


def earlier_run(
    settings: RunSettings, chosen: Sequence[Sample], *, resume: bool
) -> tuple[dict[str, Any], tuple[Row, ...]] | None:
    """Summary and rows of the finished run of these settings and samples that is in the output folder. None if nothing
    is lost there (no run, one without a finished sample, a dry run, which measures nothing), and with `resume` for any other run
    of these settings.

    Raises: ConfigError with the remedy, for another run or a stopped one.
    """
    folder = Path(settings.output or "")
    told, summary = read_object(folder / SETTINGS), read_object(folder / SUMMARY)
    if settings.output is None or not told or not _has_samples(folder):
        return None
    changed = changed_settings(told, settings.named())
    if told.get(SIGNED) != __version__ and not resume:
        changed.append(SIGNED)
    finished = "samples" in summary and "stopped_before" not in summary
    rows = _rows(folder) if finished else ()
    same = not changed and [_of(row) for row in rows] == [(one.id, one.question, one.answer) for one in chosen]
    stateful = settings.cache.cache_dir is not None or settings.cache.fusion_cache_dir is not None
    if finished and same and (resume or not stateful):
        return summary, rows
    if changed:
        raise ConfigError(f"--output {str(folder)!r} has a run with other settings ({', '.join(changed)}): {REMEDY}")
    if resume:
        return None
    if not finished:
        raise ConfigError(f"--output {str(folder)!r} has a run that was stopped: add --resume to continue it, {REMEDY}")
    if same:
        raise ConfigError(
            f"--output {str(folder)!r} has a finished run, and another one would begin with what it left in its cache folder: {REMEDY}"
        )
    raise ConfigError(f"--output {str(folder)!r} has a run over other samples: {REMEDY}")


def _has_samples(folder: Path) -> bool:
    path = folder / SAMPLES
    return path.exists() and path.stat().st_size > 0


def _rows(folder: Path) -> tuple[Row, ...]:
    try:
        return finished_rows(folder)
    except ConfigError:  # a line was cut off by a kill
        return ()


def _of(row: Row) -> tuple[str, str, str | None]:
    return row.sample_id, row.question, row.answer
