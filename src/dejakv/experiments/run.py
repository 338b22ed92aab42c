"""`dejakv run`: the same samples through every arm, interleaved in one process, and what came of it."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dejakv.datasets.base import Sample
from dejakv.datasets.registry import DatasetOptions, open_dataset, samples
from dejakv.datasets.workload import WorkloadOptions
from dejakv.engines.open import open_engine, open_templates
from dejakv.errors import ConfigError, DatasetError
from dejakv.experiments.arms import pipeline_for
from dejakv.experiments.dry_run import dry_run
from dejakv.experiments.prompting import Prompter
from dejakv.experiments.settings import Arm, RunSettings
from dejakv.experiments.shares import measured, model_is_missing, shares_alone
from dejakv.experiments.sizes import sizes_of
from dejakv.experiments.summary import Outcome, Row, summarize
from dejakv.pipeline import Pipeline
from dejakv.request import Sampling

WARM_UP = 3
Progress = Callable[[int, int, Row], None]


@dataclass(frozen=True)
class RunResult:
    """`rows` is empty for a dry run. `output`: where the files were written, if anywhere."""

    summary: dict[str, Any]
    rows: tuple[Row, ...]
    output: Path | None


def run(settings: RunSettings, progress: Progress | None = None, engine: Any = None) -> RunResult:
    """Runs the comparison (or the dry run) and writes `samples.jsonl` and `summary.json` if an output is given.

    Raises: ConfigError, DatasetError, ModelError, each naming the flag to change.
    """
    chosen = tuple(read_samples(settings))
    if not chosen:
        raise DatasetError(f"the data set {settings.dataset!r} gave no samples: check --dataset-path and --split")
    if settings.output is not None:
        _output_folder(settings.output)  # before the work, not after it
    if settings.cache_mode == "shares" or (
        engine is None and settings.cache_mode == "dry-run" and model_is_missing(settings)
    ):
        summary, lines = shares_alone(settings, chosen)
        return RunResult(summary, (), write(settings.output, summary, lines))
    if engine is None:
        with opened(settings) as engine:
            return _run(settings, chosen, engine, progress)
    return _run(settings, chosen, engine, progress)


@contextmanager
def opened(settings: RunSettings) -> Iterator[Any]:
    """The engine of these settings, closed afterwards if it can be: a process holds one vLLM at a time."""
    engine = open_engine(settings)
    try:
        yield engine
    finally:
        close = getattr(engine, "close", None)
        if close is not None:
            close()


def _run(settings: RunSettings, chosen: Sequence[Sample], engine: Any, progress: Progress | None) -> RunResult:
    prompter = Prompter(open_templates(settings), settings.prompt_template, settings.chunk_source)
    if settings.cache_mode == "dry-run":
        summary, lines = dry_run(settings, chosen, engine, prompter)
        _label_media(summary, settings)
        return RunResult(summary, (), write(settings.output, summary, lines))
    with cache_folder(settings) as settings:
        rows, sizes = _run_arms(settings, chosen, engine, prompter, progress)
    summary = summarize(rows, settings.model, settings.dataset, sizes)
    summary |= measured(chosen, prompter, engine.prepare)
    _label_media(summary, settings)
    return RunResult(summary, tuple(rows), write(settings.output, summary, [row.as_dict() for row in rows]))


def _label_media(summary: dict[str, Any], settings: RunSettings) -> None:
    summary["media"] = settings.cache.media
    if settings.cache.media == "ignore":
        summary["warning"] = "media=ignore: donors with other pictures were allowed, as the prototypes did"


def _output_folder(output: str) -> Path:
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output!r} cannot be made: {error.strerror}") from error
    return folder


def read_samples(settings: RunSettings) -> Iterator[Sample]:
    """The samples of a run, in its order."""
    options = DatasetOptions(
        path=settings.dataset_path,
        config=settings.dataset_config,
        split=settings.split,
        image_root=settings.cache.image_root,
        max_samples=settings.max_samples,
        seed=settings.seed,
        shuffle_seed=settings.shuffle_seed,
    )
    workload = WorkloadOptions(settings.passages, settings.order, settings.window, settings.compact_tools)
    return samples(open_dataset(settings.dataset, options, workload), options)


def _run_arms(
    settings: RunSettings, chosen: Sequence[Sample], engine: Any, prompter: Prompter, progress: Progress | None
) -> tuple[list[Row], dict[str, Any]]:
    live = settings.cache_mode == "live"
    arms: list[Arm] = [arm for arm in settings.arms if live or arm != "cache"]
    pipelines: dict[str, Pipeline] = {arm: pipeline_for(arm, engine, settings.cache) for arm in arms}
    held = pipelines["cache"].cache if "cache" in pipelines else None
    started_with = held.store.stats().entries if held is not None else 0
    sampling = Sampling(settings.max_new_tokens, settings.temperature, seed=settings.seed)
    _warm_up(Pipeline(engine.for_arm("none")), chosen[:WARM_UP], prompter, sampling)
    rows: list[Row] = []
    names = list(pipelines)
    for number, sample in enumerate(chosen):
        request = prompter.request(sample, sampling)
        outcomes: dict[str, Outcome] = {}
        for turn in range(len(names)):  # another arm goes first each time, so that none profits from a warm cache line
            name = names[(turn + number) % len(names)]
            answer = pipelines[name].answer(request)
            outcomes[name] = Outcome(answer.record, answer.text, answer.cached_answer)
            if (used := pipelines[name].cache) is not None:
                used.flush()
        row = Row(sample.id, sample.question, sample.answer, {name: outcomes[name] for name in names})
        rows.append(row)
        if progress is not None:
            progress(number + 1, len(chosen), row)
    cached = pipelines["cache"].cache if "cache" in pipelines else None
    sizes = {**sizes_of(cached), "started_with_chunks": started_with} if cached is not None else {}
    for pipeline in pipelines.values():
        if pipeline.cache is not None:
            pipeline.cache.close()
    return rows, sizes


def _warm_up(pipeline: Pipeline, chosen: Sequence[Sample], prompter: Prompter, sampling: Sampling) -> None:
    for sample in chosen:
        pipeline.answer(prompter.request(sample, sampling))


@contextmanager
def cache_folder(settings: RunSettings) -> Iterator[RunSettings]:
    """A fresh folder for the cache, removed afterwards, unless the user gave one."""
    if settings.cache.cache_dir is not None:
        yield settings
        return
    folder = tempfile.mkdtemp(prefix="dejakv-run-")
    try:
        yield replace(settings, cache=replace(settings.cache, cache_dir=folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write(output: str | None, summary: dict[str, Any], lines: Sequence[dict[str, Any]]) -> Path | None:
    """Writes the two files of a run. Returns their folder."""
    if output is None:
        return None
    folder = _output_folder(output)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    with (folder / "samples.jsonl").open("w") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
    return folder
