"""Registry of the parts that the core knows by name alone.

Each group of parts is also a group of entry points, so that an installed package can add to it:

    [project.entry-points."dejakv.methods"]
    nearest = "my_package:NEAREST"

A part is imported at its first use.
"""

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from dejakv.errors import ConfigError

METHODS = "dejakv.methods"
"""Methods of reuse: objects of `decide.method.ReuseMethod`."""

MODEL_TYPES = "dejakv.model_types"
"""Types of models: objects of `models.layout.ModelType`."""

OBSERVERS = "dejakv.observers"
"""Observers of requests: functions that make one of a cache's settings and an engine."""

_PARTS: dict[str, dict[str, Any]] = {
    METHODS: {
        "exact": "dejakv.decide.methods:EXACT",
        "adopt": "dejakv.decide.methods:ADOPT",
        "blend": "dejakv.decide.methods:BLEND",
        "top_layer": "dejakv.prototypes.top_layer.method:TOP_LAYER",
    },
    MODEL_TYPES: {"lckv-llama": "dejakv.prototypes.lckv.model_type:LCKV_LLAMA"},
    OBSERVERS: {"fusion": "dejakv.prototypes.fusion:build_fusion"},
}
"""Parts by group and name; one that is not imported yet stands as `module:attribute`."""


@cache
def _installed(group: str) -> dict[str, str]:
    """Return the entry points of installed packages, as `module:attribute` by name."""
    return {entry.name: entry.value for entry in entry_points(group=group)}


def names(group: str) -> tuple[str, ...]:
    """Return the names of a group's parts: own and registered ones, then those of entry points.

    Parameters
    ----------
    group : str
        `METHODS`, `MODEL_TYPES` or `OBSERVERS`.

    Returns
    -------
    tuple[str, ...]
        Names, each once.
    """
    return tuple(dict.fromkeys((*_PARTS[group], *_installed(group))))


def register(group: str, name: str, part: Any) -> None:
    """Add a part to a group, for this process.

    Parameters
    ----------
    group : str
        `METHODS`, `MODEL_TYPES` or `OBSERVERS`.
    name : str
        Name of the part, in settings, requests and records. A part of this name is replaced.
    part : Any
        The part, or where it stands as `module:attribute`.

    Raises
    ------
    ConfigError
        For a name of the core's own methods, on which the promise of exactness rests.
    """
    if group == METHODS and name in ("none", "off", "prefix", "exact", "adopt", "blend"):
        raise ConfigError(f"the method {name!r} is the core's own: choose another name")
    _PARTS[group][name] = part


def load(group: str, name: str) -> Any:
    """Return a part, which is imported at its first use.

    Parameters
    ----------
    group : str
        `METHODS`, `MODEL_TYPES` or `OBSERVERS`.
    name : str
        Name of the part.

    Returns
    -------
    Any
        The part.

    Raises
    ------
    ConfigError
        For an unknown name, and for a part whose module does not import or lacks it.
    """
    parts = _PARTS[group]
    part = parts.get(name) or _installed(group).get(name)
    if part is None:
        raise ConfigError(f"{name!r} is unknown: choose one of {', '.join(names(group))}")

    if isinstance(part, str):
        module, _, attribute = part.partition(":")
        try:
            part = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            others = ", ".join(other for other in names(group) if other != name)
            raise ConfigError(
                f"{name!r} cannot be used, since {part} does not import ({error}): install the "
                "package that has it (dejakv itself has dejakv.prototypes)"
                + (f", or choose one of {others}" if others else "")
            ) from error
        parts[name] = part
    return part
