"""Many runs from one specification, a row of a log each (`sweep_log`), in this process or in several.

    defaults: {preset: docs, max_samples: 20}      # of every experiment
    grid:                                          # every combination; one object or a list of them
      similarity_threshold: [0.6, 0.8]
      blend_quality: [strict, default]
    experiments:                                   # one by one; their own settings override the defaults
      - {name: exact, reuse: exact, notes: nothing approximate}

Names are the options of `dejakv run` with underscores; an experiment may name a `preset`. The name of a combination is made of its
values, or of the grid's `name` with `{similarity_threshold}` and the like in it.
"""

import itertools
import json
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

from dejakv.config import SemanticCacheConfig
from dejakv.engines.open import state_folders
from dejakv.errors import ConfigError, DejaKVError
from dejakv.experiments.output import make_folder
from dejakv.experiments.plain_words import counted
from dejakv.experiments.run import run
from dejakv.experiments.settings import RunSettings, did_you_mean, settings_from, settings_of, split_settings
from dejakv.experiments.settings import preset as preset_settings
from dejakv.experiments.summary import Progress
from dejakv.experiments.sweep_log import log_line, open_log
from dejakv.settings import shown
from dejakv.store import purge_folder

logger = logging.getLogger(__name__)

PARTS = ("defaults", "grid", "experiments", "notes")
MOST = 10_000
"""Experiments in a sweep."""

_FOLDER = re.compile(r"[^\W_](?:[\w.+=@ ,()-]{0,198}[\w+=@)-])?")
"""Names of experiments, which are names of folders on every system too."""


class Experiment(NamedTuple):
    """One run of a sweep."""

    name: str
    settings: RunSettings
    notes: str


class Done(NamedTuple):
    """A finished experiment: its summary, or the reason why it has none."""

    experiment: Experiment
    summary: dict[str, Any] | None
    error: str = ""


def sweep(
    spec: dict[str, Any],
    log_file: str | Path,
    samples_dir: str | Path | None = None,
    *,
    resume: bool = False,
    purge: bool = False,
    jobs: int = 1,
    progress: Callable[[str, dict[str, Any]], None] | None = None,
    watch: Progress | None = None,
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
    planned, watch = experiments(spec, samples_dir), watch or Progress()
    if jobs < 1:
        raise ConfigError(f"--jobs {jobs}: give 1 or more")
    if jobs > 1:
        _check_folders(planned)
    if samples_dir is not None:
        make_folder(samples_dir, "--samples-dir")

    def before(experiment: Experiment) -> None:
        for folder in state_folders(experiment.settings.engine, experiment.settings.cache) if purge else ():
            purge_folder(folder)

    with open_log(log_file, resume) as log:
        waiting = [experiment for experiment in planned if not log.finished(experiment.name, experiment.settings)]
        lines: list[dict[str, Any]] = []
        for (name, settings, notes), summary, error in (
            _here(waiting, before, watch) if jobs == 1 else _in_processes(waiting, jobs, before, watch)
        ):
            lines.append(log_line(name, summary, notes, settings, error))
            log.append(lines[-1])
            if progress is not None:
                progress(name, {"error": error} if summary is None else summary)
        return lines


def read_spec(path: str | Path) -> dict[str, Any]:
    """A specification file, which `entries` checks. Raises: ConfigError as `read_file`."""
    return read_file(path, "--specs")


def read_file(path: str | Path, flag: str) -> Any:
    """The content of a JSON or YAML file. Raises: ConfigError naming the flag if it is missing, neither of the two, or no object."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return _yaml(text) if Path(path).suffix in (".yaml", ".yml") else json.loads(text, object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"cannot read {str(path)!r} ({why}): give a JSON or YAML file with {flag}") from error


def experiments(spec: Any, samples_dir: str | Path | None) -> list[Experiment]:
    """Each experiment's name, settings and notes.

    Raises: ConfigError naming the experiment and the mistake.
    """
    found = entries(spec)
    _check_names(entry.get("name") for entry in found)
    return [_experiment(entry, samples_dir) for entry in found]


def _experiment(merged: dict[str, Any], samples_dir: str | Path | None) -> Experiment:
    name: str = merged["name"]
    run_part, cache_part = split_settings(merged, f"sweep entry {shown(name)}")
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


def _check_names(names: Iterable[object]) -> None:
    """Raises: ConfigError for a name that is no folder's on every system, or the folder of another one."""
    seen: dict[str, str] = {}
    for given in names:
        name = unicodedata.normalize("NFC", given) if isinstance(given, str) else given
        device = isinstance(name, str) and re.fullmatch(r"(?i)(con|prn|aux|nul|(com|lpt)\d)(\..*)?", name)
        if not isinstance(name, str) or device or not _FOLDER.fullmatch(name) or len(name.encode()) > 200:
            raise ConfigError(
                f"an experiment cannot be named {shown(name)}: a folder is named after it, so give every experiment a 'name' of at most "
                "200 letters, digits and -_+=@.,() and put the rest in 'notes'"
            )
        if (folded := name.casefold()) in seen:
            raise ConfigError(
                f"every experiment of a sweep needs its own name: {shown(seen[folded])} and {shown(name)} are the same folder"
            )
        seen[folded] = name


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


def entries(spec: Any) -> list[dict[str, Any]]:
    """Every experiment with the defaults in it, those of the grid first. Raises: ConfigError for anything else than a sweep."""
    if not isinstance(spec, dict) or not ("experiments" in spec or "grid" in spec):
        raise ConfigError(
            "this is not a sweep: give 'experiments', a list of one or more objects, or a 'grid', an object of lists, and "
            "optionally 'defaults', an object"
        )
    for key in spec:
        if key not in PARTS:
            raise ConfigError(
                f"a sweep has no part {shown(key)}{did_you_mean(str(key), PARTS)}: give {', '.join(PARTS)}; settings of all "
                "experiments are 'defaults'"
            )
    defaults = spec.get("defaults", {})
    if not isinstance(defaults, dict):
        raise ConfigError(f"a sweep's 'defaults' are {shown(defaults)}: give an object, as for an experiment")
    grids = spec.get("grid", [])
    single = spec.get("experiments", [])
    if not isinstance(single, list) or not all(isinstance(entry, dict) for entry in single):
        raise ConfigError("a sweep's 'experiments' are no list of objects: give a list of one or more objects")
    found: list[dict[str, Any]] = []
    for grid in grids if isinstance(grids, list) else [grids]:
        found += itertools.islice(_combinations(grid), MOST + 1)
        if len(found) > MOST:
            raise ConfigError(f"the grid has more than {MOST:,} combinations: give shorter lists")
    found = [{**defaults, **entry} for entry in (*found, *single)]
    if not found:
        raise ConfigError("the sweep has no experiments: give a list of one or more objects")
    return found


def _combinations(grid: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(grid, dict) or not grid:
        raise ConfigError(f"a sweep's 'grid' is {shown(grid)}: give an object of lists, or a list of such objects")
    for key, values in grid.items():
        if isinstance(values, list) and not values:
            raise ConfigError(f"the grid's {shown(key)} is an empty list: give its values")
    axes = {key: values if isinstance(values, list) else [values] for key, values in grid.items() if key != "name"}
    template = grid.get("name")
    if template is not None:
        _check_template(template, set(axes))
    varying = [key for key, values in axes.items() if len(values) > 1] or list(axes)
    for values in itertools.product(*axes.values()):
        entry = dict(zip(axes, values, strict=True))
        made = template.format(**{key: _plain(value) for key, value in entry.items()}) if template is not None else ""
        yield {"name": made or "-".join(f"{key}-{_plain(entry[key])}" for key in varying), **entry}


def _check_template(template: object, known: set[str]) -> None:
    if not isinstance(template, str):
        raise ConfigError(f"the grid's name {shown(template)} is no text: give one like 'run-{{similarity_threshold}}'")
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"the grid's name {shown(template)} is not valid ({error}): write {{{{ for a brace"
        ) from error
    for _, name, form, how in parts:
        if name is not None and (name not in known or form or how):
            raise ConfigError(
                f"the grid's name {shown(template)} has {{{name}}}: use keys of the grid, {', '.join(sorted(known))}"
            )


def _plain(value: object) -> str:
    """A value as a part of a name, which is also a folder's."""
    text = "+".join(_plain(item) for item in value) if isinstance(value, list) else str(value)
    return re.sub(r"[^\w.+=@-]+", "_", text).strip("_.") or "none"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is given twice in one object")
        found[key] = value
    return found


def _yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Plain values only; a key that is given twice is an error."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            _once([(str(key), None) for key in keys if key != "<<"])
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def carry_out(experiment: Experiment, watch: Progress | None = None) -> Done:
    """Runs one experiment here. A failure of any kind is a result, so that the others still run.

    Raises: KeyboardInterrupt if the run was interrupted: what it measured so far is no result of the sweep.
    """
    try:
        result = run(experiment.settings, watch)
    except DejaKVError as error:
        return Done(experiment, None, " ".join(str(error).split()))
    except Exception as error:  # an experiment may run foreign code; its failure is its own row
        logger.exception("the experiment %r failed", experiment.name)
        return Done(experiment, None, " ".join(f"unexpected {type(error).__name__}: {error}".split()))
    if result.stopped:
        raise KeyboardInterrupt
    return Done(experiment, result.summary)


def _here(planned: Sequence[Experiment], before: Callable[[Experiment], None], watch: Progress) -> Iterator[Done]:
    for number, experiment in enumerate(planned, 1):
        before(experiment)
        watch.stage(f"{experiment.name}, {number} of {len(planned)}")
        yield carry_out(experiment, watch)


def _in_processes(
    planned: Sequence[Experiment], jobs: int, before: Callable[[Experiment], None], watch: Progress
) -> Iterator[Done]:
    """Several experiments at a time, in processes that end with this one, even if it is killed. They share the cores, so times of such a
    sweep are not comparable with those of a single run."""
    workers: list[subprocess.Popen[str]] = []
    idle: list[subprocess.Popen[str]] = []
    ended = threading.Event()

    def one(experiment: Experiment) -> Done:
        before(experiment)
        try:
            worker = idle.pop()
        except IndexError:
            worker = _worker(jobs)
            workers.append(worker)
        if ended.is_set():
            worker.kill()
        done = _answer(worker, experiment)
        if worker.poll() is None:
            idle.append(worker)
        return done

    pool = ThreadPoolExecutor(jobs)
    try:
        watch.stage(f"{counted(len(planned), 'experiment')}, {jobs} at a time")
        running = [pool.submit(one, experiment) for experiment in planned]
        for number, done in enumerate(as_completed(running), 1):
            result = done.result()
            watch.sample(number, len(planned), None)
            yield result
    finally:
        ended.set()
        for worker in workers:
            worker.kill()
        pool.shutdown(cancel_futures=True)
        for worker in workers:
            with suppress(OSError):
                worker.communicate()


def _worker(jobs: int) -> subprocess.Popen[str]:
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)), **os.environ}
    return subprocess.Popen(
        [sys.executable, "-m", __spec__.name, "sweep-worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment, start_new_session=True,
    )  # fmt: skip


def _answer(worker: subprocess.Popen[str], experiment: Experiment) -> Done:
    assert worker.stdin is not None
    assert worker.stdout is not None
    answer = ""
    with suppress(BrokenPipeError):
        worker.stdin.write(json.dumps(experiment.settings.named(), default=str) + "\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
    if answer.endswith("\n"):
        return Done(experiment, *json.loads(answer))
    code = worker.wait()
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    why = f"{name}, perhaps for lack of memory: give fewer --jobs" if name == "SIGKILL" else name
    return Done(experiment, None, f"its process ended unexpectedly ({why})")


def work() -> None:
    """Runs experiments of another process: a line of JSON in, a line out. Prints of libraries go to standard error, and the process ends
    with its input: whoever wanted the answer is gone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    tasks: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            tasks.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        done = carry_out(Experiment("", settings_of(json.loads(tasks.get())), ""))
        answers.write(json.dumps([done.summary, done.error]) + "\n")
        answers.flush()


SEMANTIC = (0.5, 0.6, 0.7, 0.8, 0.9)
LATENT = (0.7, 0.8, 0.9)
NO_PICTURE = 1
"""Bytes of encoder outputs in which none fits."""
KEPT = SemanticCacheConfig.encoder_bytes


def ablation(models: Sequence[str], dims: tuple[str, str] = ("384", "512"), **defaults: Any) -> dict[str, Any]:
    """The ablation of the first prototype: each level alone, over thresholds, for every given model. Every run has exact prefixes; encoder
    outputs are kept in the fusion run alone. A model takes 16 runs: exact text only, fusion (encoder outputs) only, semantic text at
    five thresholds, and a 3 x 3 grid of prompt and vision thresholds, in which the vision layer decides about other pictures.

    `dims` are the dimensions of the prompt and the vision layer; `defaults` join every run.

    Raises: ConfigError for a model that is given twice.
    """
    experiments: list[dict[str, Any]] = []
    for model, name in zip(models, _folder_names(models), strict=True):
        off = {"model": model, "disable_semantic_cache": True, "disable_exact_cache": True}
        off |= {"embedding_layers": [], "embedding_hook": "none", "encoder_bytes": NO_PICTURE}
        experiments.append({**off, "name": f"{name}-exact", "disable_exact_cache": False})
        experiments.append({**off, "name": f"{name}-fusion", "enable_fusion_cache": True, "encoder_bytes": KEPT})
        experiments += [
            {**off, "name": f"{name}-semantic-{t}", "disable_semantic_cache": False, "similarity_threshold": t}
            for t in SEMANTIC
        ]
        experiments += [
            {
                **off,
                "name": f"{name}-latent-{prompt}-{vision}",
                "embedding_layers": [f"prompt:{dims[0]}:{prompt}", f"vision:{dims[1]}:{vision}"],
                "embedding_hook": "prompt_vision",
                "media": "similar",
            }
            for prompt in LATENT
            for vision in LATENT
        ]
    return {"defaults": {"reuse": "adopt", **defaults}, "experiments": experiments}


def _folder_names(models: Sequence[str]) -> list[str]:
    """A name of its own for each model: the last part of it, or all of it where two have the same."""
    if len(set(models)) < len(models):
        raise ConfigError("a model of the ablation is given twice: give each --model once")
    short = [model.rstrip("/").rsplit("/", 1)[-1] for model in models]
    return [
        name if short.count(name) == 1 else model.strip("/").replace("/", "-")
        for model, name in zip(models, short, strict=True)
    ]


def layer_dims(preset_name: str | None) -> tuple[str, str]:
    """The dimensions of the prompt and vision layers that a preset declares; MiniLM's and CLIP's if it has none."""
    layers: dict[str, str] = {"prompt": "384", "vision": "512"}
    if preset_name is not None:
        for layer in preset_settings(preset_name)[1].get("embedding_layers", ()):
            name, dim = layer.split(":")[:2]
            layers[name] = dim
    return layers["prompt"], layers["vision"]


if __name__ == "__main__":
    work()
