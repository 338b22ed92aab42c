"""Settings of a run: model, data, arms. Cache settings are `SemanticCacheConfig`; a preset fills both."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from dejakv.config import SemanticCacheConfig
from dejakv.datasets.workload import OPTIONS
from dejakv.engines.choice import ModelChoice
from dejakv.errors import ConfigError
from dejakv.models import names
from dejakv.presets import dataset_of, preset
from dejakv.records import UNSOUND_LABEL
from dejakv.settings import AnyPath, Count, Folder, Positive, Within, from_mapping

Arm = Literal["none", "prefix", "cache"]
CacheMode = Literal["live", "dry-run", "off", "shares"]
ARMS: tuple[Arm, ...] = get_args(Arm)


@dataclass(frozen=True)
class RunSettings(ModelChoice):
    """Settings of one run. `seed` seeds the data set and sampling; `noise_floor` samples are computed in fp32 and in bf16.
    `passages`, `order`, `window`, `compact_tools`: see `WorkloadOptions`. `repeat`: how often the samples come, one round after
    the other. `promote`: after each request the cache computes one waiting prompt exactly, outside of all times, as a server does in
    idle time. `raw_prompts`: the field `prompt` of a line of a log is sent as it stands. `implied`: what was set because of other settings, in sentences for the report."""

    model: str = "shapes-vlm"
    dataset: str = "shapes"
    dataset_config: str | None = None
    dataset_path: AnyPath | None = None
    split: str | None = None
    passages: int | None = None
    order: str | None = None
    window: int | None = None
    compact_tools: int | None = None
    max_samples: Positive = 320
    shuffle_seed: int | None = None
    chunk_source: str = "question"
    prompt_template: str | None = None
    raw_prompts: bool = False
    cache_mode: CacheMode = "live"
    arms: tuple[Arm, ...] = ARMS
    max_new_tokens: Positive = 16
    temperature: Annotated[float, Within(0)] = 0.0
    seed: int = 0
    noise_floor: Count = 0
    repeat: Positive = 1
    promote: bool = False
    output: Folder | None = None
    implied: tuple[str, ...] = ()
    cache: SemanticCacheConfig = field(default_factory=SemanticCacheConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_floor and self.engine == "vllm":
            raise ConfigError(
                f"--noise-floor {self.noise_floor} is measured on the transformers engine, which runs the model in fp32 and in bf16:"
                " leave it out, or give --engine transformers"
            )
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise ConfigError(
                f"--arms {','.join(self.arms)!r}: give one or more of {', '.join(ARMS)}, each once, separated by commas"
            )

    def named(self) -> dict[str, Any]:
        """Every setting by name; the cache's settings have the prefix `cache.`."""
        values = {name: value for name, value in vars(self).items() if name != "cache"}
        return {**values, **{f"cache.{name}": value for name, value in vars(self.cache).items()}}


def settings_from(preset_name: str | None, run: dict[str, Any], cache: dict[str, Any]) -> RunSettings:
    """Settings of a preset, overridden by the given ones. None means: not given.

    Raises: ConfigError for unknown presets, names and values.
    """
    base_run, base_cache = preset(preset_name) if preset_name else ({}, {})
    merged = {**base_run, **{name: value for name, value in run.items() if value is not None}}
    given = {name: value for name, value in cache.items() if value is not None}
    if preset_name is None and merged.get("model") in names():
        given.setdefault("index_encoder", "model")  # these models work offline, so their encoder must too
    every = {**base_cache, **given}
    if "index_encoder" in every:  # who names one wants it used
        every.setdefault("semantic_text", True)
    implied: list[str] = []
    if "dataset" not in merged and (found := dataset_of(merged.get("model", RunSettings.model))):
        merged["dataset"] = found
        if found != RunSettings.dataset:
            implied.append(f"the data set is {found}, the one of {merged['model']}; --dataset names another")
    for name, dataset in OPTIONS.items():
        if run.get(name) is not None and merged.get("dataset", RunSettings.dataset) != dataset:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} is an option of the data set {dataset}: leave it out, or give --dataset {dataset}"
            )
    dataset = merged.get("dataset", RunSettings.dataset)
    if merged.get("raw_prompts") and dataset != "jsonl" and ":" not in dataset:
        raise ConfigError(
            f"--raw-prompts is for prompts of a log, and {dataset} has none: leave it out, or give --dataset jsonl"
        )
    if "reuse" not in every and (why := _asks_for_similar(merged, every)):
        every["reuse"] = "adopt"
        implied.append(
            f"{why} asks for similar prompts, so --reuse is adopt; with --reuse exact only equal prompts are reused"
        )
    config = SemanticCacheConfig.from_dict(every)
    if config.unsound:
        implied.append(
            f"answers that come of another prompt's top layer begin with {UNSOUND_LABEL.strip()} if the model is an ordinary one: it "
            "says them without having read the prompt in the layers below"
        )
    if config.error_bound is not None and config.reuse == "exact":
        raise ConfigError(
            f"--error-bound {config.error_bound:g} bounds approximate answers, and reuse is exact: give --reuse adopt, blend or top_layer"
        )
    return from_mapping(RunSettings, {**merged, "cache": config, "implied": tuple(implied)}, "a run's settings")


def _asks_for_similar(run: Mapping[str, Any], cache: Mapping[str, Any]) -> str:
    """The flag that has no effect under exact reuse; empty if there is none."""
    if "similarity_threshold" in cache:
        return "--similarity-threshold"
    if cache.get("embedding_layers"):
        return "--embedding-layer"
    source = run.get("chunk_source", "question")
    return "" if source in ("question", "prompt") else f"--chunk-source {source}"
