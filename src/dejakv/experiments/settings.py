"""Settings of a run: model, data, arms, beside the cache's settings; a preset fills both.

Every setting has one name everywhere: an option of `dejakv run` (with hyphens), a key of `--set`,
of a `--config` file and of a sweep.
"""

import difflib
import json
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import field, fields
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal, get_args

from dejakv import plugins
from dejakv.config import (
    FORMER,
    REMOVED_SETTINGS,
    FindSettings,
    KeepSettings,
    ReuseSettings,
    SemanticCacheConfig,
)
from dejakv.datasets.registry import OPTIONS, check_name
from dejakv.engines.open import ModelChoice
from dejakv.errors import ConfigError, command_line
from dejakv.models import names
from dejakv.settings import (
    AnyPath,
    Count,
    Folder,
    NumberRange,
    Positive,
    display,
    from_mapping,
    from_text,
    kinds_of,
    strict_dataclass,
)
from dejakv.trust.settings import TrustSettings

SHARES_MODEL = "smollm2-135m"


@cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("dejakv.experiments").joinpath("presets.toml").read_text())


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets."""
    return tuple(_table())


def default_for(dataset: str | None, cache_mode: str | None) -> tuple[str | None, dict[str, str]]:
    """Choose preset and settings of a run without preset and model.

    It is the preset named like the data set, `shapes` without a data set. A dry run over the user's
    own prompts has a small general model.

    Returns
    -------
    tuple of str or None and dict
        The preset's name, and further settings.

    Raises
    ------
    ConfigError
        For the user's own prompts to answer without a model.
    DatasetError
        For an unknown data set.
    """
    if dataset is None:
        return "shapes", {}
    if dataset in preset_names():
        return dataset, {}
    check_name(dataset)
    if cache_mode == "dry-run":
        return None, {"model": SHARES_MODEL}

    of_data = [name for name in preset_names() if _table()[name]["dataset"] == dataset]
    fitting = f"--preset {' or '.join(of_data)}, or " if of_data else ""
    fetch = command_line(f"models get {SHARES_MODEL}")
    raise ConfigError(
        f"--dataset {dataset!r} comes with no model: give {fitting}--model NAME ({SHARES_MODEL} for"
        f" texts, after `{fetch}`), or `dejakv estimate LOG`, which answers nothing and needs none"
    )


def preset(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the run settings and cache settings of a preset, as copies.

    Raises
    ------
    ConfigError
        For an unknown name; it lists the known ones.
    """
    try:
        preset_values = dict(_table()[name])
    except KeyError:
        raise ConfigError(
            f"unknown preset {name!r}: choose one of {', '.join(preset_names())}"
        ) from None
    # The pop changes the first value as well: what is left are the run's settings.
    return preset_values, dict(preset_values.pop("cache", {}))


Arm = Literal["none", "prefix", "cache"]
CacheMode = Literal["live", "dry-run", "off"]
ARMS: tuple[Arm, ...] = get_args(Arm)
_PREFIX = "cache."


@strict_dataclass(flags=True)
class RunSettings(ModelChoice):
    """Settings of one run."""

    model: str = "shapes-vlm"
    dataset: str = "shapes"
    """`shapes`, `docs`, `repo`, `rag`, `sessions`, `gqa`, `log`, `folder` or
    `package.module:factory`. The last four need a model or a dry run"""
    dataset_config: str | None = None
    """gqa: configuration on the hub"""
    dataset_path: AnyPath | None = None
    """file or folder to read; repo: name of an installed package or a folder"""
    split: str | None = None
    """gqa: split on the hub; None: val"""
    passages: int | None = None
    """rag: passages in a prompt; None: 8"""
    order: str | None = None
    """rag: order of passages: score, document, shuffled, or free (by score, and the cache may
    arrange them); None: score"""
    window: int | None = None
    """sessions: history messages kept; 0: all"""
    compact_tools: int | None = None
    """sessions: tool results kept whole, older ones become one line; None: all"""
    max_samples: Positive = 320
    """samples to run"""
    shuffle_seed: int | None = None
    """seed to shuffle the samples with; None: not shuffled"""
    chunk_source: str = "question"
    """text to compare for a donor: question, semantic, group, combined, prompt or a field of the
    sample"""
    prompt_template: str | None = None
    """prompt text with {question} and {context}"""
    raw_prompts: bool = False
    """log: send the field 'prompt' of a line as it stands, without a chat template"""
    cache_mode: CacheMode = "live"
    """`live`, `dry-run` (no decoding) or `off`"""
    arms: tuple[Arm, ...] = ARMS
    """arms to compare: none (nothing reused), prefix (prefix caching) and cache"""
    max_new_tokens: Positive = 16
    """longest answer, in tokens"""
    temperature: Annotated[float, NumberRange(0)] = 0.0
    """sampling temperature; 0: greedy"""
    seed: int = 0
    """of the data set and of sampling"""
    repeat: Positive = 1
    """rounds over the samples"""
    rounding: Count = 0
    """samples to answer in bf16 as well, in full: how many answers rounding changes without any
    reuse. For fp32"""
    promote: bool = False
    """compute approximately answered prompts exactly after each request, untimed, as a server does
    in idle time"""
    output: Folder | None = None
    """folder for samples.jsonl and summary.json; a run in it is never replaced"""
    implied: tuple[str, ...] = ()
    """settings that follow from others, in sentences for the report"""
    cache: SemanticCacheConfig = field(default_factory=SemanticCacheConfig)
    """settings of the cache"""

    def __post_init__(self) -> None:
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise ConfigError(
                f"--arms {','.join(self.arms)!r}: give one or more of {', '.join(ARMS)}, each "
                f"once, separated by commas"
            )
        if self.rounding and (self.dtype, self.engine) != ("fp32", "transformers"):
            raise ConfigError(
                f"--rounding {self.rounding} compares bf16 with fp32, and this run is of "
                f"{self.engine} with --dtype {self.dtype}: "
                "give --dtype fp32, or leave --rounding out"
            )

    def named(self) -> dict[str, Any]:
        """Return every setting by name; the cache's settings have the prefix `cache.`."""
        values = {name: value for name, value in vars(self).items() if name != "cache"}
        return {**values, **{f"{_PREFIX}{name}": value for name, value in vars(self.cache).items()}}


CACHE_KINDS = kinds_of(SemanticCacheConfig)
RUN_KINDS = {
    name: kind for name, kind in kinds_of(RunSettings).items() if name not in ("cache", "implied")
}
PARTS = {
    name: frozenset(item.name for item in fields(part))
    for name, part in (
        ("run", RunSettings), ("find", FindSettings), ("blend", ReuseSettings),
        ("keep", KeepSettings), ("trust", TrustSettings),
    )
}  # fmt: skip
"""Parts of the settings, whose name may stand before a setting's.

`blend.share` is `blend_share`, and `keep.ttl` is `ttl`.
"""
NOT_SETTINGS = ("name", "preset", "notes")
"""Keys of a sweep's experiment beside its settings."""
SWITCHES = {
    "disable_semantic_cache": "semantic_text",
    "disable_exact_cache": "exact_text",
    "disable_prefix_cache": "exact_prefix",
    "disable_copied_text": "copied_text",
    "disable_lexical_guard": "lexical_guard",
}
"""Options that switch a setting off."""
SINGULARS = {"embedding_layer": "embedding_layers", "level": "levels"}
"""Options that are given once for each item of a list."""
KEYS = (*NOT_SETTINGS, *sorted({*SWITCHES, *SINGULARS, *CACHE_KINDS, *RUN_KINDS}))


def split_settings(
    named_values: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split named values of a sweep, a file or the command line into run and cache settings.

    Parameters
    ----------
    named_values : mapping
        Values by name.
    where : str
        Their source, for messages.

    Returns
    -------
    tuple of dict and dict
        Settings of the run and of the cache, by field. `name`, `preset` and `notes` are left out.

    Raises
    ------
    ConfigError
        For an unknown name, with the nearest known one, for a removed one, with its replacement,
        and for a switch that is neither true nor false.

    Examples
    --------
    >>> values = {"blend.share": 0.2, "disable_exact_cache": True, "model": "docs-lm"}
    >>> split_settings(values, "an example")
    ({'model': 'docs-lm'}, {'blend_share': 0.2, 'exact_text': False})
    """
    run_part: dict[str, Any] = {}
    cache_part: dict[str, Any] = {}

    for key, value in named_values.items():
        name = plain_name(str(key))
        if name in NOT_SETTINGS:
            continue
        if name in SWITCHES:
            if not isinstance(value, bool):
                raise ConfigError(
                    f"{where}: {name}={display(value)} is neither true nor false: give one of them"
                )
            cache_part[SWITCHES[name]] = not value
        elif name in SINGULARS:
            cache_part[SINGULARS[name]] = value if isinstance(value, list | tuple) else [value]
        elif name in CACHE_KINDS:
            # One value of a list needs no brackets.
            listed = str(CACHE_KINDS[name]).startswith("tuple[") and isinstance(value, str)
            cache_part[name] = [value] if listed else value
        elif name in RUN_KINDS:
            run_part[name] = value
        elif name in REMOVED_SETTINGS:
            raise ConfigError(f"{where}: {name} is no setting any more: {REMOVED_SETTINGS[name]}")
        else:
            raise ConfigError(
                f"{where} has the unknown setting {display(key)}{did_you_mean(name, KEYS)}: names"
                " are the options of `dejakv run`"
            )

    return run_part, cache_part


def plain_name(key: str) -> str:
    """Return the field name of `blend.share`, `blend-share` or `blend_share`: `blend_share`.

    Former names become today's, and unknown ones stay.
    """
    part, dot, rest = key.replace("-", "_").rpartition(".")
    rest = FORMER.get(rest, rest)
    if dot and part in PARTS:
        return next(
            (name for name in (rest, f"{part}_{rest}") if name in PARTS[part]), f"{part}.{rest}"
        )
    return f"{part}{dot}{rest}"


def read_set(text: str) -> tuple[str, Any]:
    """Return name and value of a `--set NAME=VALUE`; a ConfigError tells of another text."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r}: give NAME=VALUE, such as blend.share=.2")

    name = plain_name(key.strip())
    kind = {
        **RUN_KINDS,
        **CACHE_KINDS,
        **dict.fromkeys(SWITCHES, bool),
        **dict.fromkeys(SINGULARS, tuple[str, ...]),
    }
    try:
        return name, from_text(value.strip(), kind.get(name, str))
    except ValueError as error:
        raise ConfigError(
            f"--set {text!r} is not valid JSON ({error}): give a list like [1, 2], or 1,2"
        ) from error


def did_you_mean(name: str, candidates: tuple[str, ...]) -> str:
    """Return ` (did you mean X?)` with the candidate most like `name`; "" if none is like it."""
    near = difflib.get_close_matches(name, candidates, 1, 0.7)
    return f" (did you mean {near[0]}?)" if near else ""


def settings_from(
    preset_name: str | None, run: dict[str, Any], cache: dict[str, Any]
) -> RunSettings:
    """Return the settings of a preset, overridden by values that are given (None: not given).

    Without a data set, it is that of the first preset with this model. A setting for similar
    prompts makes `reuse` `adopt`, unless that is given. `implied` tells of both.

    Parameters
    ----------
    preset_name : str or None
        Name of the preset.
    run : dict
        Settings of the run, by field.
    cache : dict
        Settings of the cache, by field.

    Raises
    ------
    ConfigError
        For unknown presets, names and values, an option of another data set, raw prompts without a
        log, and an error bound with exact reuse.
    """
    base_run, base_cache = preset(preset_name) if preset_name else ({}, {})
    merged = {**base_run, **{name: value for name, value in run.items() if value is not None}}
    cache_values = {name: value for name, value in cache.items() if value is not None}
    if preset_name is None and merged.get("model") in names():
        # These models work offline, so their encoder must too.
        cache_values.setdefault("index_encoder", "model")
    every = {**base_cache, **cache_values}

    # Who names an encoder wants it used.
    if "index_encoder" in every:
        every.setdefault("semantic_text", True)
    implied: list[str] = []

    # Without a data set, it is the one of the first preset with this model.
    if "dataset" not in merged:
        model = merged.get("model", RunSettings.model)
        preset_dataset = next(
            (each["dataset"] for each in _table().values() if each["model"] == model),
            RunSettings.dataset,
        )
        merged["dataset"] = preset_dataset
        if preset_dataset != RunSettings.dataset:
            implied.append(
                f"the data set is {preset_dataset}, the one of {model}; --dataset names another"
            )

    dataset = merged["dataset"]

    # Another data set would ignore them without a word.
    for name, owner in OPTIONS.items():
        if run.get(name) is not None and dataset != owner:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} is an option of the data set {owner}: leave it out, or give --dataset"
                f" {owner}"
            )

    if merged.get("raw_prompts") and dataset not in ("jsonl", "log") and ":" not in dataset:
        raise ConfigError(
            f"--raw-prompts is for prompts of a log, and {dataset} has none: leave it out, or give"
            " --dataset log"
        )
    if "reuse" not in every and (why := _asks_for_similar(merged, every)):
        every["reuse"] = "adopt"
        implied.append(
            f"{why} asks for similar prompts, so --reuse is adopt; with --reuse exact only equal"
            " prompts are reused"
        )

    config = SemanticCacheConfig.from_dict(every)
    if config.error_bound is not None and config.reuse == "exact":
        others = [name for name in plugins.names(plugins.METHODS) if name != "exact"]
        raise ConfigError(
            f"--error-bound {config.error_bound:g} bounds approximate answers, and reuse is exact:"
            f" give --reuse {' or '.join((', '.join(others[:-1]), others[-1]))}"
        )
    return from_mapping(
        RunSettings, {**merged, "cache": config, "implied": tuple(implied)}, "a run's settings"
    )


def _asks_for_similar(run: Mapping[str, Any], cache: Mapping[str, Any]) -> str:
    """Return a flag that has no effect under exact reuse; empty if there is none."""
    if "similarity_threshold" in cache:
        return "--similarity-threshold"
    if cache.get("embedding_layers"):
        return "--embedding-layer"
    source = run.get("chunk_source", "question")
    return "" if source in ("question", "prompt") else f"--chunk-source {source}"


def settings_of(named: Mapping[str, Any]) -> RunSettings:
    """Restore settings from `RunSettings.named`, also as read from JSON.

    Raises
    ------
    ConfigError
        For unknown or removed names, and for wrong values.
    """
    cache = {
        name.removeprefix(_PREFIX): value
        for name, value in named.items()
        if name.startswith(_PREFIX)
    }
    plain = {name: value for name, value in named.items() if not name.startswith(_PREFIX)}
    return from_mapping(
        RunSettings,
        {**plain, "cache": SemanticCacheConfig.from_dict(cache)},
        "a run's settings",
        REMOVED_SETTINGS,
    )


def run_command_of(named: Mapping[str, Any]) -> str:
    """Return the `dejakv run` command of these settings, without defaults.

    They are as `RunSettings.named` has them, also as read from JSON.
    """
    # Both through JSON, so that tuples and paths compare as a file has them.
    defaults, named = (
        json.loads(json.dumps(dict(each), default=str)) for each in (RunSettings().named(), named)
    )
    if any(named.get(key) != defaults.get(key) for key in ("cache.reuse", "cache.index_encoder")):
        # The default of this setting follows from those two.
        defaults.pop("cache.semantic_text")
    words = ["dejakv", "run", "--model", str(named.get("model", RunSettings.model))]
    for key, value in named.items():
        name = key.removeprefix(_PREFIX)
        if (
            name in ("implied", "dejakv_version", "model")
            or value == defaults.get(key)
            or value is None
        ):
            continue
        words += _option(name, value)

    return shlex.join(words)


def _option(name: str, value: Any) -> list[str]:
    flag = {
        setting_name: option_name
        for option_name, setting_name in (*SWITCHES.items(), *SINGULARS.items())
    }.get(name, name)
    dashed = "--" + flag.replace("_", "-")
    if flag in SWITCHES:
        return [dashed] if value is False else []
    if isinstance(value, bool):
        return [dashed] if value else ["--set", f"{name}=false"]
    if isinstance(value, list) and name not in ("arms", "costs"):
        return [word for item in value for word in (dashed, str(item))]

    return [dashed, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
