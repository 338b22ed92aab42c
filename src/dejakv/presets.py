"""Named bundles of settings, read from `presets.toml`."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from dejakv.errors import ConfigError

DRY_RUN_MODEL = "smollm2-135m"


@cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("dejakv").joinpath("presets.toml").read_text())


def names() -> tuple[str, ...]:
    """Every preset there is."""
    return tuple(_table())


def about(name: str) -> str:
    """One line on what a preset is for."""
    return str(_table()[name]["about"])


def default_for(dataset: str | None, cache_mode: str | None) -> tuple[str | None, str | None]:
    """Preset and model of a run that names neither: the preset of the data set's name if there is one, `shapes` else. A dry
    run over prompts of one's own counts tokens of a general language model."""
    if dataset in names():
        return dataset, None
    if dataset is not None and cache_mode == "dry-run":
        return None, DRY_RUN_MODEL
    return "shapes", None


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
