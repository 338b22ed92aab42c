"""What a run is told: model, data, arms. Cache settings are `SemanticCacheConfig`; a preset fills both."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError
from dejakv.models import names
from dejakv.presets import preset

Arm = Literal["none", "prefix", "cache"]
CacheMode = Literal["live", "dry-run", "off", "shares"]
ARMS: tuple[Arm, ...] = get_args(Arm)


@dataclass(frozen=True)
class RunSettings:
    """Settings of one run. `seed` seeds the data set and sampling. `passages`, `order`, `window`, `compact_tools`: see
    `WorkloadOptions`."""

    model: str = "shapes-vlm"
    engine: str = "transformers"
    dtype: str = "auto"
    device: str = "auto"
    attn: str = "sdpa"
    trust_remote_code: bool = False
    dataset: str = "shapes"
    dataset_config: str | None = None
    dataset_path: str | None = None
    split: str | None = None
    passages: int | None = None
    order: str | None = None
    window: int | None = None
    compact_tools: int | None = None
    max_samples: int = 320
    shuffle_seed: int | None = None
    chunk_source: str = "question"
    prompt_template: str | None = None
    cache_mode: CacheMode = "live"
    arms: tuple[Arm, ...] = ARMS
    max_new_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    output: str | None = None
    cache: SemanticCacheConfig = field(default_factory=SemanticCacheConfig)

    def __post_init__(self) -> None:
        unknown = [arm for arm in self.arms if arm not in ARMS]
        if unknown or not self.arms:
            raise ConfigError(f"--arms {','.join(self.arms)!r}: give some of {', '.join(ARMS)}, separated by commas")
        if self.cache_mode not in get_args(CacheMode):
            raise ConfigError(f"--cache-mode {self.cache_mode!r}: choose one of {', '.join(get_args(CacheMode))}")
        if self.engine not in ("transformers", "vllm"):
            raise ConfigError(f"--engine {self.engine!r}: choose transformers or vllm")
        if self.temperature < 0:
            raise ConfigError(f"--temperature {self.temperature} is negative: 0 is greedy, 1 samples as trained")
        if self.max_samples < 1 or self.max_new_tokens < 1:
            raise ConfigError("--max-samples and --max-new-tokens must be at least 1")


def settings_from(preset_name: str | None, run: dict[str, Any], cache: dict[str, Any]) -> RunSettings:
    """Settings of a preset with the given ones laid over it. None means: not given.

    Raises: ConfigError for unknown presets, names and values.
    """
    base_run, base_cache = preset(preset_name) if preset_name else ({}, {})
    known = {item.name for item in fields(RunSettings)}
    unknown = sorted(set(run) - known)
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}: known are {', '.join(sorted(known - {'cache'}))}")
    merged = {**base_run, **{name: value for name, value in run.items() if value is not None}}
    if isinstance(merged.get("arms"), list):
        merged["arms"] = tuple(merged["arms"])
    given = {name: value for name, value in cache.items() if value is not None}
    if preset_name is None and merged.get("model") in names():
        given.setdefault("index_encoder", "model")  # these models work offline, so what they need beside them must too
    return RunSettings(**merged, cache=SemanticCacheConfig.from_dict({**base_cache, **given}))
