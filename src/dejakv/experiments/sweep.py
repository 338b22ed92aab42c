"""Many runs from one specification, one after the other, a row of a log each (`sweep_log`).

    defaults: {preset: docs, max_samples: 20}      # of every experiment
    grid:                                          # every combination; one object or a list
      similarity_threshold: [0.6, 0.8]
      blend_quality: [strict, default]
    experiments:                                   # one by one, over the defaults
      - {name: exact, reuse: exact, notes: nothing approximate}

Names are the options of `dejakv run` with underscores; an experiment may name a `preset`. The name
of a combination is made of its values, or of the grid's `name` with `{similarity_threshold}` and
the like in it.
"""

import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dejakv.config import SemanticCacheConfig
from dejakv.engines.open import state_places
from dejakv.errors import ConfigError, DejaKVError
from dejakv.experiments.output import make_folder
from dejakv.experiments.run import run
from dejakv.experiments.settings import (
    RunSettings,
    did_you_mean,
    preset,
    settings_from,
    split_settings,
)
from dejakv.experiments.summary import RunProgress
from dejakv.experiments.sweep_log import log_line, open_log
from dejakv.settings import display
from dejakv.store import purge_place

logger = logging.getLogger(__name__)

PARTS = ("defaults", "grid", "experiments", "notes")
MAX_EXPERIMENTS = 10_000
"""Most combinations of a sweep's grids."""

_FOLDER = re.compile(r"[^\W_](?:[\w.+=@ ,()-]{0,198}[\w+=@)-])?")
"""Names of experiments, which are names of folders too."""


class SweepExperiment(NamedTuple):
    """Name, settings and notes of one run of a sweep; the name is that of its folder too."""

    name: str
    settings: RunSettings
    notes: str


def sweep(
    spec: dict[str, Any],
    log_file: str | Path,
    samples_dir: str | Path | None = None,
    *,
    resume: bool = False,
    purge: bool = False,
    watch: RunProgress | None = None,
    lines: (
        Callable[[Sequence[SweepExperiment], bool, RunProgress], Iterator[dict[str, Any]]] | None
    ) = None,
) -> list[dict[str, Any]]:
    """Run a sweep's experiments, appending a line to the log after each.

    A failed experiment gets a line with the reason in `error`, and the others run.

    Parameters
    ----------
    spec : dict
        The specification, as the module shows it.
    log_file : str or Path
        The log, a .csv file.
    samples_dir : str or Path, optional
        Folder for the output folders of the experiments.
    resume : bool
        Whether to continue a log: its experiments are skipped, except failed ones. Without it the
        log must not exist.
    purge : bool
        Whether to delete an experiment's cache folders before it runs.
    watch : RunProgress, optional
        Observer of stages and samples.
    lines : callable, optional
        Runs the experiments and yields their lines (`on_ray.experiments_on`); by default they run
        one after the other in this process.

    Returns
    -------
    list[dict]
        The new lines.

    Raises
    ------
    ConfigError
        For a wrong specification, log or folder, before the first run.
    StoreError
        If a folder to be purged is not a store.
    """
    planned, watch = read_experiments(spec, samples_dir), watch or RunProgress()
    if samples_dir is not None:
        make_folder(samples_dir, "--samples-dir")
    with open_log(log_file, resume) as log:
        # Raises here, before the first run, if a logged one had other settings.
        waiting = [
            experiment
            for experiment in planned
            if not log.finished(experiment.name, experiment.settings)
        ]
        new_lines: list[dict[str, Any]] = []
        # Logged one by one, so that an interrupt loses only the experiment under way.
        for line in (lines or _in_turn)(waiting, purge, watch):
            new_lines.append(line)
            log.append(line)

        return new_lines


def _in_turn(
    waiting: Sequence[SweepExperiment], purge: bool, watch: RunProgress
) -> Iterator[dict[str, Any]]:
    for number, experiment in enumerate(waiting, 1):
        watch.stage(f"{experiment.name}, {number} of {len(waiting)}")
        yield run_experiment(experiment, purge, watch)


def run_experiment(
    experiment: SweepExperiment, purge: bool = False, watch: RunProgress | None = None
) -> dict[str, Any]:
    """Run one experiment; a failure of any kind is a line too, so that the others still run.

    Raises
    ------
    KeyboardInterrupt
        If the run was interrupted: what it measured so far is no result of the sweep.
    StoreError
        If a folder to be purged is not a store.
    """
    name, settings, notes = experiment
    for place in state_places(settings.engine, settings.cache) if purge else ():
        purge_place(place)
    try:
        # An interrupted experiment goes on behind its finished samples.
        result = run(settings, watch, resume=settings.output is not None)
    except DejaKVError as error:
        return failed_line(experiment, str(error))
    except Exception as error:
        # An experiment may run foreign code; its failure is its own row.
        logger.exception("the experiment %r failed", name)
        return failed_line(experiment, f"unexpected {type(error).__name__}: {error}")

    if result.stopped:
        raise KeyboardInterrupt
    return log_line(name, result.summary, notes, settings)


def failed_line(experiment: SweepExperiment, why: str) -> dict[str, Any]:
    """Return the line of an experiment that failed."""
    return log_line(
        experiment.name, None, experiment.notes, experiment.settings, " ".join(why.split())
    )


def read_file(path: str | Path, flag: str) -> Any:
    """Read a YAML file (.yaml, .yml) or else a JSON file, plain values only.

    Raises
    ------
    ConfigError
        If the file is missing or neither of the two; it names the flag.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        return yaml.safe_load(text) if Path(path).suffix in (".yaml", ".yml") else json.loads(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(
            f"cannot read {str(path)!r} ({why}): give a JSON or YAML file with {flag}"
        ) from error


def read_experiments(spec: Any, samples_dir: str | Path | None = None) -> list[SweepExperiment]:
    """Read a sweep: name, settings and notes of each experiment.

    Raises
    ------
    ConfigError
        For a mistake or a repeated name.
    """
    planned = [_experiment(entry, samples_dir) for entry in expand_entries(spec)]
    seen: set[str] = set()
    for name, _, _ in planned:
        # Names become folders, and some file systems ignore case.
        if name.casefold() in seen:
            raise ConfigError(
                f"every experiment of a sweep needs its own name: {display(name)} is twice the same"
                " folder"
            )
        seen.add(name.casefold())

    return planned


def _experiment(merged: dict[str, Any], samples_dir: str | Path | None) -> SweepExperiment:
    name, start, notes = merged.get("name"), merged.get("preset"), merged.get("notes", "")
    if not isinstance(name, str) or not _FOLDER.fullmatch(name) or len(name.encode()) > 200:
        raise ConfigError(
            f"an experiment cannot be named {display(name)}: a folder is named after it, so give"
            " every experiment a 'name' of at most 200 letters, digits and -_+=@.,() and put the"
            " rest in 'notes'"
        )

    run_part, cache_part = split_settings(merged, f"sweep entry {display(name)}")
    if samples_dir is not None:
        run_part["output"] = str(Path(samples_dir) / name)
    for key, value in (("preset", start), ("notes", notes)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(
                f"sweep entry {name!r}: {key}={display(value)} is no text: give a string"
            )

    try:
        return SweepExperiment(name, settings_from(start, run_part, cache_part), notes or "")
    except ConfigError as error:
        raise ConfigError(f"sweep entry {name!r}: {error}") from error


def expand_entries(spec: Any) -> list[dict[str, Any]]:
    """Return every experiment with the defaults in it, those of the grid first.

    Raises
    ------
    ConfigError
        For anything else than a sweep.
    """
    if not isinstance(spec, dict) or not ("experiments" in spec or "grid" in spec):
        raise ConfigError(
            "this is not a sweep: give 'experiments', a list of one or more objects, or a 'grid',"
            " an object of lists, and optionally 'defaults', an object"
        )
    for key in spec:
        if key not in PARTS:
            raise ConfigError(
                f"a sweep has no part {display(key)}{did_you_mean(str(key), PARTS)}: give"
                f" {', '.join(PARTS)}; settings of all experiments are 'defaults'"
            )

    # Each part has its empty kind, since a sweep needs only one of them.
    defaults, grids, single = (
        spec.get(part, kind())
        for part, kind in (("defaults", dict), ("grid", list), ("experiments", list))
    )
    if not isinstance(defaults, dict):
        raise ConfigError(
            f"a sweep's 'defaults' are {display(defaults)}: give an object, as for an experiment"
        )
    if not isinstance(single, list) or not all(isinstance(entry, dict) for entry in single):
        raise ConfigError(
            "a sweep's 'experiments' are no list of objects: give a list of one or more objects"
        )
    sweep_entries: list[dict[str, Any]] = []
    for grid in grids if isinstance(grids, list) else [grids]:
        # One beyond the limit shows that there are too many, without making all of them.
        sweep_entries += itertools.islice(_combinations(grid), MAX_EXPERIMENTS + 1)
        if len(sweep_entries) > MAX_EXPERIMENTS:
            raise ConfigError(
                f"the grid has more than {MAX_EXPERIMENTS:,} combinations: give shorter lists"
            )

    sweep_entries = [{**defaults, **entry} for entry in (*sweep_entries, *single)]
    if not sweep_entries:
        raise ConfigError("the sweep has no experiments: give a list of one or more objects")
    return sweep_entries


def _combinations(grid: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(grid, dict) or not grid:
        raise ConfigError(
            f"a sweep's 'grid' is {display(grid)}: give an object of lists, or a list of such"
            " objects"
        )

    axes = {
        key: values if isinstance(values, list) else [values]
        for key, values in grid.items()
        if key != "name"
    }

    empty = next((key for key, values in axes.items() if not values), None)
    if empty is not None:
        raise ConfigError(f"the grid's {display(empty)} is an empty list: give its values")

    # A key with one value would only lengthen every name.
    varying = [key for key, values in axes.items() if len(values) > 1] or list(axes)
    template = grid.get("name", "-".join(f"{key}-{{{key}}}" for key in varying))
    for values in itertools.product(*axes.values()):
        entry = dict(zip(axes, values, strict=True))
        try:
            name = template.format(**{key: _plain(value) for key, value in entry.items()})
        except (AttributeError, ValueError, LookupError) as error:
            raise ConfigError(
                f"the grid's name {display(template)} is not valid ({error}): give a text like"
                f" 'run-{{seed}}' with keys of the grid, {', '.join(sorted(axes))}"
            ) from error
        yield {**entry, "name": name}


def _plain(value: object) -> str:
    """Return a value as a part of a name, which is also a folder's."""
    text = "+".join(_plain(item) for item in value) if isinstance(value, list) else str(value)
    return re.sub(r"[^\w.+=@-]+", "_", text).strip("_.") or "none"


SEMANTIC = [0.5, 0.6, 0.7, 0.8, 0.9]
LATENT = (0.7, 0.8, 0.9)
NO_PICTURE = 1
"""Bytes of encoder outputs in which none fits."""


def ablation(
    models: Sequence[str], dims: tuple[str, str] = ("384", "512"), **defaults: Any
) -> dict[str, Any]:
    """Return the ablation of the first prototype: each level alone, over thresholds.

    Every run has exact prefixes; encoder outputs are kept in the fusion run alone. A model takes 16
    runs: exact text only, fusion (encoder outputs) only, semantic text at five thresholds, and a 3
    x 3 grid of prompt and vision thresholds, in which the vision layer decides about other
    pictures.

    Parameters
    ----------
    models : sequence of str
        The models.
    dims : tuple of str
        Dimensions of the prompt and the vision layer.
    **defaults
        Settings of every run.
    """
    off: dict[str, Any] = {
        "disable_semantic_cache": True,
        "disable_exact_cache": True,
        "embedding_layers": [[]],
    }
    off |= {"model": list(models), "embedding_hook": "none", "encoder_bytes": NO_PICTURE}
    default_encoder_bytes = SemanticCacheConfig.encoder_bytes
    layers = [
        [f"prompt:{dims[0]}:{prompt_threshold}", f"vision:{dims[1]}:{vision_threshold}"]
        for prompt_threshold in LATENT
        for vision_threshold in LATENT
    ]
    latent = {"embedding_layers": layers, "embedding_hook": "prompt_vision", "media": "similar"}
    grid: list[dict[str, Any]] = [
        {**off, "name": "{model}-exact", "disable_exact_cache": False},
        {
            **off,
            "name": "{model}-fusion",
            "enable_fusion_cache": True,
            "encoder_bytes": default_encoder_bytes,
        },
        {
            **off,
            "name": "{model}-semantic-{similarity_threshold}",
            "disable_semantic_cache": False,
            "similarity_threshold": SEMANTIC,
        },
        {**off, "name": "{model}-latent-{embedding_layers}", **latent},
    ]

    return {"defaults": {"reuse": "adopt", **defaults}, "grid": grid}


def layer_dims(name: str | None) -> tuple[str, str]:
    """Return the dimensions of a preset's prompt and vision layers; else MiniLM's and CLIP's."""
    declared = preset(name)[1].get("embedding_layers", ()) if name is not None else ()
    layers = {"prompt": "384", "vision": "512", **dict(layer.split(":")[:2] for layer in declared)}
    return layers["prompt"], layers["vision"]
