"""The specification of a sweep, JSON or YAML, and the experiments that it means.

    defaults: {preset: docs, max_samples: 20}      # of every experiment
    grid:                                          # every combination; one object or a list of them
      similarity_threshold: [0.6, 0.8]
      blend_quality: [strict, default]
    experiments:                                   # one by one; their own settings override the defaults
      - {name: exact, reuse: exact, notes: nothing approximate}

The name of a combination is made of its values, or of the grid's `name` with `{similarity_threshold}` and the like in it.
"""

import itertools
import json
import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from string import Formatter
from typing import Any

from dejakv.errors import ConfigError
from dejakv.experiments.keys import did_you_mean
from dejakv.settings import shown

PARTS = ("defaults", "grid", "experiments", "notes")
MOST = 10_000
"""Experiments in a sweep."""


def read_spec(path: str | Path) -> dict[str, Any]:
    """A specification file. Raises: ConfigError if it is missing, or neither JSON nor YAML; `entries` checks its content."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return _yaml(text) if Path(path).suffix in (".yaml", ".yml") else json.loads(text, object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(
            f"cannot read the sweep {str(path)!r} ({why}): give a JSON or YAML file with --specs"
        ) from error


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
