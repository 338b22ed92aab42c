"""The `dejakv run` command of a run's settings."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from dejakv.experiments.keys import PLURALS, SWITCHES
from dejakv.experiments.settings import RunSettings

_OF_FIELD = {field: (flag, off) for flag, (field, off) in SWITCHES.items()}
_SINGLE = {field: flag for flag, field in PLURALS.items()}
_NO_FLAG = (
    "implied", "dejakv_version", "memory_bytes", "encoder_bytes", "blend_donors", "ttl_fusion", "top_layer_tail",
)  # fmt: skip


def run_command_of(named: Mapping[str, Any]) -> str:
    """The command whose settings these are (`RunSettings.named`, also as read from JSON). Defaults are left out."""
    defaults: dict[str, Any] = json.loads(json.dumps(RunSettings().named(), default=str))
    if any(named.get(key) != defaults.get(key) for key in ("cache.reuse", "cache.index_encoder")):
        defaults.pop("cache.semantic_text")  # its default is another then
    words = ["dejakv", "run", "--model", str(named.get("model", RunSettings.model))]
    for key, value in named.items():
        name = key.removeprefix("cache.")
        if name in _NO_FLAG or name == "model" or value == defaults.get(key) or value is None:
            continue
        words += _flag(name, value)
    return shlex.join(words)


def _flag(name: str, value: Any) -> list[str]:
    if name in _OF_FIELD:
        flag, off = _OF_FIELD[name]
        return [_dashed(flag)] if value is off else []
    if name in _SINGLE:
        return [word for item in value for word in (_dashed(_SINGLE[name]), str(item))]
    if isinstance(value, bool):
        return [_dashed(name)] if value else []
    return [_dashed(name), ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)]


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")
