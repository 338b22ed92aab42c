"""Named bundles of settings, read from `presets.toml`."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from dejakv.datasets.registry import check_name
from dejakv.errors import ConfigError, command

SHARES_MODEL = "smollm2-135m"


@cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("dejakv.experiments").joinpath("presets.toml").read_text())


def names() -> tuple[str, ...]:
    """Every preset there is."""
    return tuple(_table())


def about(name: str) -> str:
    """One line on what a preset is for."""
    return str(_table()[name]["about"])


def default_for(dataset: str | None, cache_mode: str | None) -> tuple[str | None, dict[str, str]]:
    """Preset and settings of a run that names neither preset nor model: the preset of the data set's name if there is one,
    `shapes` without a data set. A dry run over prompts of one's own has no model to ask: it measures shares, by a general
    tokenizer.

    Raises: ConfigError where prompts of one's own are to be answered and no model is named; DatasetError for an unknown
    data set.
    """
    if dataset is None:
        return "shapes", {}
    if dataset in names():
        return dataset, {}
    check_name(dataset)
    if cache_mode in ("dry-run", "shares"):
        return None, {"model": SHARES_MODEL, "cache_mode": "shares"}
    of_data = [name for name in names() if _table()[name]["dataset"] == dataset]
    fitting = f"--preset {' or '.join(of_data)}, or " if of_data else ""
    fetch = command(f"models get {SHARES_MODEL}")
    raise ConfigError(
        f"--dataset {dataset!r} comes with no model: give {fitting}--model NAME ({SHARES_MODEL} for texts, after `{fetch}`), "
        "or --cache-mode dry-run, which answers nothing and needs none"
    )


def dataset_of(model: str) -> str | None:
    """The data set of the first preset with this model; None if there is none."""
    return next((values["dataset"] for values in _table().values() if values["model"] == model), None)


def preset(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run settings and cache settings of a preset, as copies.

    Raises: ConfigError for an unknown name, listing the known.
    """
    try:
        found = dict(_table()[name])
    except KeyError:
        raise ConfigError(f"unknown preset {name!r}: choose one of {', '.join(names())}") from None
    found.pop("about")
    return found, dict(found.pop("cache", {}))
