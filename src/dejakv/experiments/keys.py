"""The settings that a sweep's experiments may have: every field of a run's and of the cache's settings, by the name of its flag.

A new field is a key by itself. Only flags that are not named like their field are listed here.
"""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError
from dejakv.experiments.settings import RunSettings
from dejakv.settings import shown

NOT_SETTINGS = ("name", "preset", "notes")
"""Keys of an experiment beside its settings."""

SWITCHES = {
    "disable_semantic_cache": ("semantic_text", False),
    "disable_exact_cache": ("exact_text", False),
    "disable_prefix_cache": ("exact_prefix", False),
    "disable_copied_text": ("copied_text", False),
    "disable_lexical_guard": ("lexical_guard", False),
}
"""Flags that switch a field off."""

PLURALS = {"embedding_layer": "embedding_layers", "level": "levels", "trust_groups": "trust_groups", "quotas": "quotas"}
"""Flags that are given once for each item of a list; `embedding_layer` takes a list or one item."""

CACHE_KEYS = frozenset(item.name for item in fields(SemanticCacheConfig))
RUN_KEYS = frozenset(item.name for item in fields(RunSettings)) - {"cache", "implied"}
KEYS = (*NOT_SETTINGS, *sorted({*SWITCHES, *PLURALS, *CACHE_KEYS, *RUN_KEYS}))


def split_settings(entry: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run settings and cache settings of an experiment. Raises: ConfigError for an unknown name, with the nearest known one."""
    run_part: dict[str, Any] = {}
    cache_part: dict[str, Any] = {}
    for given, value in entry.items():
        name = str(given).replace("-", "_")
        if name in NOT_SETTINGS:
            continue
        if name in SWITCHES:
            if not isinstance(value, bool):
                raise ConfigError(
                    f"sweep entry {shown(entry.get('name'))}: {name}={shown(value)} is neither true nor false: give one of them"
                )
            target, off = SWITCHES[name]
            cache_part[target] = off if value else not off
        elif name in PLURALS:
            cache_part[PLURALS[name]] = value if isinstance(value, list) else [value]
        elif name in CACHE_KEYS:
            cache_part[name] = value
        elif name in RUN_KEYS:
            run_part[name] = value
        else:
            raise ConfigError(
                f"sweep entry {shown(entry.get('name'))} has the unknown setting {shown(given)}{did_you_mean(name, KEYS)}: "
                "names are the flags of `dejakv run`"
            )
    return run_part, cache_part


def did_you_mean(name: str, known: tuple[str, ...]) -> str:
    """` (did you mean ...?)`, or nothing if no known name is near."""
    near = difflib.get_close_matches(name, known, 1, 0.7)
    return f" (did you mean {near[0]}?)" if near else ""
