"""`dejakv run`: from settings to samples, an engine, a comparison (or a dry run) and the files of its output folder."""

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
from dejakv.datasets.registry import begin, told
from dejakv.engines.open import hidden_size, open_templates, takes_pictures
from dejakv.errors import ConfigError, DatasetError, ModelError
from dejakv.experiments.compare import check_ran, compare, opened, rounded
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
    """`rows` is empty for a dry run. `output`: the folder of the files, if any. `stopped`: interrupted before the last sample.
    `earlier`: nothing was measured, it is the finished run that was in the folder."""

    summary: dict[str, Any]
    rows: tuple[SampleRow, ...]
    output: Path | None
    stopped: bool = False
    earlier: bool = False


def run(
    settings: RunSettings, watch: RunProgress | None = None, engine: Any = None, *, resume: bool = False
) -> RunResult:
    """Runs the comparison (or the dry run). With an output folder, `samples.jsonl` grows with each finished sample, and
    `summary.json` follows at the end, also after an interrupt.

    A finished run of the same settings in that folder is the result, and any other is an error: none is replaced.

    resume  continue the stopped run of the same settings in the output folder; start a new one if there is none

    Raises: ConfigError, DatasetError, ModelError, each naming the flag to change.
    """
    if engine is None:
        # A missing model is told before the data set is read, which may take long.
        resolve(settings.model)
    settings, chosen = chosen_samples(settings, resume)
    return run_chosen(settings, chosen, watch or RunProgress(), engine, resume=resume)


def chosen_samples(settings: RunSettings, resume: bool = False) -> tuple[RunSettings, tuple[Sample, ...]]:
    """The samples of a run, and its settings with what was left of the file. Raises: as `run`."""
    if resume and settings.output is None:
        raise ConfigError("--resume needs the folder of the stopped run: give --output")

    if settings.output is not None:
        # A folder that cannot be used is told before any sample is read.
        run_folder(settings.output)
    check_config(settings.cache)
    dataset = opened_dataset(settings)
    read, more = begin(read_samples(settings, beyond=1, dataset=dataset), settings.max_samples)
    left_out = dataset.left_out if isinstance(dataset, RequestLog) else []
    chosen = repeated(read, settings.repeat)
    if not chosen:
        why = "; ".join(left_out) or "check --dataset-path and --split"
        raise DatasetError(f"the data set {settings.dataset!r} has no samples: {why}")
    # What the samples lack for these settings is said now, not after a model was loaded.
    for sample in chosen:
        chunk_of(sample, settings.chunk_source, "")
    SamplePrompter(template=settings.prompt_template)
    read_of = told(settings.dataset_path, len(read), more)
    return replace(settings, implied=(*settings.implied, *read_of, *left_out)), chosen


def run_chosen(
    settings: RunSettings, chosen: Sequence[Sample], watch: RunProgress, engine: Any = None, *, resume: bool = False
) -> RunResult:
    """Runs these samples. Raises: as `run`."""
    with output_locked(settings):  # before the work, not after it
        if (finished_run := earlier_run(settings, chosen, resume=resume)) is not None:
            return RunResult(*finished_run, Path(settings.output or ""), earlier=True)
        pictured = next((sample for sample in chosen if sample.media), None)
        # Before the model is loaded: that may take minutes.
        if pictured is not None and not takes_pictures(settings):
            raise ModelError(
                f"sample {pictured.id} has pictures, but {settings.model} reads only text: name an image-text model with --model,"
                " or give a data set without pictures"
            )
        if engine is not None:
            return _run(settings, chosen, engine, watch)
        check_encoders(settings.cache, partial(hidden_size, settings))

        watch.stage(f"loading {settings.model}")
        with opened(settings) as engine:
            return _run(settings, chosen, engine, watch)


@contextmanager
def output_locked(settings: RunSettings) -> Iterator[None]:
    """Locks the output folder, if there is one. Raises: ConfigError if another run is in it."""
    if settings.output is None:
        yield
        return
    busy = f"a run is under way in --output {settings.output!r}: wait until it ends, or give another folder"
    with locked(run_folder(settings.output), "--output", busy):
        yield


def _run(settings: RunSettings, chosen: Sequence[Sample], engine: Any, watch: RunProgress) -> RunResult:
    prompter = SamplePrompter.of(settings, open_templates(settings))
    if settings.cache_mode == "dry-run":
        summary, lines = dry_run(settings, chosen, engine, prompter, watch)
        label(summary, settings, chosen)
        return RunResult(summary, (), write_run(settings.output, summary, lines=lines))
    log = SamplesLog(Path(settings.output), settings.named(), chosen) if settings.output is not None else None
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
    label(summary, settings, chosen)
    if done.stopped:
        summary["stopped_before"] = len(chosen)
    elif settings.rounding:
        summary["rounding"] = rounded(settings, chosen, done.rows, prompter, watch)

    output = write_run(settings.output, summary)
    return RunResult(summary, done.rows, output, done.stopped)


def label(summary: dict[str, Any], settings: RunSettings, chosen: Sequence[Sample]) -> None:
    """Adds to a summary what a reader of the figures must know beside them."""
    summary["media"] = settings.cache.media
    summary["seed"] = settings.seed
    summary["measured"] = measured()
    summary["implied"] = list(settings.implied)
    if settings.cache.prune != "none":
        summary["implied"].append(
            f"--prune {settings.cache.prune}: answers of the cache arm are decoded from pruned state"
        )

    warnings: list[str] = []
    if settings.cache.media == "ignore":
        warnings.append("media=ignore: donors with other pictures were allowed, as the prototypes did")
    summary["pictures_missing"] = missing(chosen) if wants_pictures(settings) else 0
    if summary["pictures_missing"]:
        roots = ", ".join(map(str, image_roots(settings.cache.image_root)))
        where = (
            f"missing or unreadable in {roots}" if roots else "looked for nowhere, since no folder of pictures is named"
        )
        warnings.append(
            f"{summary['pictures_missing']} of {len(chosen)} questions were asked without the picture that they name: it is "
            f"{where}; give --image-root or set {' or '.join(ROOT_VARIABLES)}"
        )

    if warnings:
        summary["warning"] = "; ".join(warnings)


@contextmanager
def cache_folder(settings: RunSettings) -> Iterator[RunSettings]:
    """A fresh folder for the cache, removed afterwards, unless the user gave one."""
    if settings.cache.store is not None:
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="dejakv-run-", ignore_cleanup_errors=True) as folder:
        yield replace(settings, cache=replace(settings.cache, store=folder))
