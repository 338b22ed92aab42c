"""`dejakv run`: from settings to samples, an engine, a comparison and the files of its output."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dejakv.build import check_config, check_encoders
from dejakv.datasets.base import Sample
from dejakv.datasets.log import RequestLog
from dejakv.datasets.registry import take_first, unread_note
from dejakv.engines.open import hidden_size, open_templates, takes_pictures
from dejakv.errors import ConfigError, DatasetError, ModelError
from dejakv.experiments.compare import bf16_agreement, check_ran, compare, engine_context
from dejakv.experiments.estimate import dry_run
from dejakv.experiments.machine import measured
from dejakv.experiments.output import locked, run_folder, write_run
from dejakv.experiments.samples import (
    SamplePrompter,
    chunk_of,
    missing,
    opened_dataset,
    read_samples,
    repeated,
    wants_pictures,
)
from dejakv.experiments.samples_log import SamplesLog, earlier_run
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.shares import shares_of
from dejakv.experiments.summary import RunProgress, SampleRow, summarize
from dejakv.models import resolve
from dejakv.vectors.image import ROOT_VARIABLES, image_roots


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes
    ----------
    summary : dict
        Content of `summary.json`.
    rows : tuple[SampleRow, ...]
        The samples in all arms; empty for a dry run.
    output : Path or None
        Folder of the files, if there is any.
    stopped : bool
        Whether the run was interrupted before its last sample.
    earlier : bool
        Whether nothing was measured, since the folder has the finished run of the same settings.
    """

    summary: dict[str, Any]
    rows: tuple[SampleRow, ...]
    output: Path | None
    stopped: bool = False
    earlier: bool = False


def run(
    settings: RunSettings,
    watch: RunProgress | None = None,
    engine: Any = None,
    *,
    resume: bool = False,
) -> RunResult:
    """Run the comparison, or the dry run.

    With an output folder, `samples.jsonl` grows with each finished sample, and `summary.json`
    follows at the end, also after an interrupt. A finished run of the same settings in that folder
    is the result, and any other is an error: none is replaced.

    Parameters
    ----------
    settings : RunSettings
        Settings of the run.
    watch : RunProgress, optional
        Observer of stages and samples.
    engine : Engine, optional
        A loaded model; by default that of the settings is opened, and closed at the end.
    resume : bool
        Whether to continue the stopped run of the same settings in the output folder, or to start a
        new one if there is none.

    Raises
    ------
    ConfigError
        For a wrong setting, and for an output folder that has another run or cannot be written.
    DatasetError
        For a data set that cannot be read or has no samples.
    ModelError
        For a model that is missing, or reads no pictures where the samples have some.
    InputError
        If none of the samples could run.
    OutputError
        If the disk is full; the run can be resumed.
    """
    if engine is None:
        # A missing model is told before the data set is read, which may take long.
        resolve(settings.model)
    settings, chosen = chosen_samples(settings, resume)
    return run_chosen(settings, chosen, watch or RunProgress(), engine, resume=resume)


def chosen_samples(
    settings: RunSettings, resume: bool = False
) -> tuple[RunSettings, tuple[Sample, ...]]:
    """Return the settings, with notes on what of the file was not read, and the samples of a run.

    An output folder is made here. The errors are those of `run`.
    """
    if resume and settings.output is None:
        raise ConfigError("--resume needs the folder of the stopped run: give --output")

    if settings.output is not None:
        # A folder that cannot be used is told before any sample is read.
        run_folder(settings.output)
    check_config(settings.cache)
    dataset = opened_dataset(settings)
    read, more = take_first(read_samples(settings, beyond=1, dataset=dataset), settings.max_samples)
    left_out = dataset.left_out if isinstance(dataset, RequestLog) else []
    chosen = repeated(read, settings.repeat)
    if not chosen:
        why = "; ".join(left_out) or "check --dataset-path and --split"
        raise DatasetError(f"the data set {settings.dataset!r} has no samples: {why}")

    # What the samples lack for these settings is said now, not after a model was loaded.
    for sample in chosen:
        chunk_of(sample, settings.chunk_source, "")
    SamplePrompter(template=settings.prompt_template)
    read_of = unread_note(settings.dataset_path, len(read), more)
    return replace(settings, implied=(*settings.implied, *read_of, *left_out)), chosen


def run_chosen(
    settings: RunSettings,
    chosen: Sequence[Sample],
    watch: RunProgress,
    engine: Any = None,
    *,
    resume: bool = False,
) -> RunResult:
    """Run the comparison or the dry run over samples that are read already.

    Files, `resume` and errors are as for `run`. The output folder is locked meanwhile.
    """
    # Locked before the work, so that two runs never measure for one folder.
    with output_locked(settings):
        if (finished_run := earlier_run(settings, chosen, resume=resume)) is not None:
            return RunResult(*finished_run, Path(settings.output or ""), earlier=True)
        pictured = next((sample for sample in chosen if sample.media), None)
        # Before the model is loaded: that may take minutes.
        if pictured is not None and not takes_pictures(settings):
            raise ModelError(
                f"sample {pictured.id} has pictures, but {settings.model} reads only text: name an"
                " image-text model with --model, or give a data set without pictures"
            )
        if engine is not None:
            return _run(settings, chosen, engine, watch)
        check_encoders(settings.cache, partial(hidden_size, settings))

        watch.stage(f"loading {settings.model}")
        with engine_context(settings) as engine:
            return _run(settings, chosen, engine, watch)


@contextmanager
def output_locked(settings: RunSettings) -> Iterator[None]:
    """Lock the output folder, if there is one; a ConfigError tells that another run is in it."""
    if settings.output is None:
        yield
        return
    busy = (
        f"a run is under way in --output {settings.output!r}: wait until it ends, or give another"
        " folder"
    )
    with locked(run_folder(settings.output), "--output", busy):
        yield


def _run(
    settings: RunSettings, chosen: Sequence[Sample], engine: Any, watch: RunProgress
) -> RunResult:
    prompter = SamplePrompter.for_run(settings, open_templates(settings))
    # A dry run computes no answers, so that it has no rows to log or to resume.
    if settings.cache_mode == "dry-run":
        summary, lines = dry_run(settings, chosen, engine, prompter, watch)
        add_run_context(summary, settings, chosen)
        return RunResult(summary, (), write_run(settings.output, summary, lines=lines))
    log = (
        SamplesLog(Path(settings.output), settings.named(), chosen)
        if settings.output is not None
        else None
    )
    try:
        with cache_folder(settings) as inside:
            done = compare(inside, chosen, engine, prompter, watch, log)
    finally:
        if log is not None:
            log.close()

    summary = summarize(done.rows, settings.model, settings.dataset, done.sizes)
    check_ran(summary["not_run"], len(done.rows))

    # Not strict, as an interrupted run has fewer rows than samples.
    ran = [sample for sample, row in zip(chosen, done.rows, strict=False) if not row.error]
    summary |= shares_of(engine.prepare(prompter.request(sample)) for sample in ran)
    add_run_context(summary, settings, chosen)
    if done.stopped:
        summary["stopped_before"] = len(chosen)
    elif settings.rounding:
        summary["rounding"] = bf16_agreement(settings, chosen, done.rows, prompter, watch)

    output = write_run(settings.output, summary)
    return RunResult(summary, done.rows, output, done.stopped)


def add_run_context(
    summary: dict[str, Any], settings: RunSettings, chosen: Sequence[Sample]
) -> None:
    """Add media, seed, machine, implied settings, missing pictures and warnings to a summary."""
    summary["media"] = settings.cache.media
    summary["seed"] = settings.seed
    summary["measured"] = measured()
    summary["implied"] = list(settings.implied)
    if settings.cache.prune != "none":
        summary["implied"].append(
            f"--prune {settings.cache.prune}: answers of the cache arm are decoded from pruned"
            " state"
        )

    warnings: list[str] = []
    if settings.cache.media == "ignore":
        warnings.append(
            "media=ignore: donors with other pictures were allowed, as the prototypes did"
        )
    summary["pictures_missing"] = missing(chosen) if wants_pictures(settings) else 0
    if summary["pictures_missing"]:
        roots = ", ".join(map(str, image_roots(settings.cache.image_root)))
        where = (
            f"missing or unreadable in {roots}"
            if roots
            else "looked for nowhere, since no folder of pictures is named"
        )
        warnings.append(
            f"{summary['pictures_missing']} of {len(chosen)} questions were asked without the"
            f" picture that they name: it is {where}; give --image-root or set"
            f" {' or '.join(ROOT_VARIABLES)}"
        )

    if warnings:
        summary["warning"] = "; ".join(warnings)


@contextmanager
def cache_folder(settings: RunSettings) -> Iterator[RunSettings]:
    """Give the cache a fresh folder, removed afterwards, unless the user gave one."""
    if settings.cache.store is not None:
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="dejakv-run-", ignore_cleanup_errors=True) as folder:
        yield replace(settings, cache=replace(settings.cache, store=folder))
