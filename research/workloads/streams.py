"""What is measured: a workload through an engine, its requests, and the arms that serve them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dejakv.blend.settings import QUALITIES
from dejakv.config import SemanticCacheConfig
from dejakv.datasets.base import Sample
from dejakv.engines.open import EngineName, open_templates
from dejakv.errors import ConfigError, DatasetError
from dejakv.experiments.samples import SamplePrompter, read_samples, repeated
from dejakv.experiments.settings import Arm, RunSettings, settings_from

REQUESTS = 30
LENGTHS = (600, 2_000)
STORE_BYTES = 32 * 1024**3
"""Of each arm: nothing is evicted, in the comparison as in prefix caching."""

BASE = "prefix"
"""Name of the arm that everything is compared with."""

PROMOTING = "promoting"
"""Name of the arm in which a prompt that was blended is computed exactly after the request,
outside of its time.
"""

ROUNDED = "bf16"
"""In which full computation shows what rounding alone changes of the answers in float32."""

_READ_PER_REQUEST = 10
"""How many samples of a workload are looked at for each that has the right length."""


@dataclass(frozen=True)
class Stream:
    """One workload through one engine.

    settings  with `repeat` the requests come so often, one round after another
    lengths   least and most prompt tokens; samples outside of them are left out
    only      arms that are measured; empty: all
    """

    settings: RunSettings
    requests: int = REQUESTS
    lengths: tuple[int, int] = LENGTHS
    only: tuple[str, ...] = ()

    @property
    def served(self) -> int:
        """Requests of all rounds."""
        return self.requests * self.settings.repeat

    @property
    def name(self) -> str:
        """The name of its folder."""
        many = f"-{self.requests}" if self.requests != REQUESTS else ""
        rounds = f"-x{self.settings.repeat}" if self.settings.repeat > 1 else ""
        rounded = f"-{self.settings.dtype}" if self.settings.dtype == ROUNDED else ""
        return f"{self.settings.dataset}-{self.settings.engine}{many}{rounds}{rounded}"

    @property
    def arms(self) -> Mapping[str, tuple[Arm, SemanticCacheConfig | None]]:
        """Those of `arms_of` that are measured."""
        every = arms_of(self.settings.cache, self.settings.repeat)
        return {name: arm for name, arm in every.items() if name in self.only or not self.only}

    def told(self) -> dict[str, Any]:
        """All that its results depend on, by name; only a run of the same goes on with its rows."""
        arms = {
            f"arms.{name}": None if config is None else str(config)
            for name, (_, config) in self.arms.items()
        }
        return {
            **self.settings.named(),
            "requests": self.requests,
            "lengths": list(self.lengths),
            **arms,
        }


def stream_of(
    workload: str,
    engine: EngineName,
    requests: int = REQUESTS,
    repeat: int = 1,
    only: Sequence[str] = (),
    *,
    rounded: bool = False,
) -> Stream:
    """A workload with the settings of its preset.

    `only`: arms beside prefix caching, which everything is compared with; empty: all. `rounded`: in
    bf16, without a blend.

    Raises: ConfigError for the arm that promotes where nothing comes again.
    """
    if PROMOTING in only and repeat < 2:
        raise ConfigError(
            f"--arm {PROMOTING} computes prompts for when they come again: give --repeat 2 or more"
        )
    run = {"engine": engine, "max_samples": _READ_PER_REQUEST * requests, "repeat": repeat}
    if rounded:
        run, only = {**run, "dtype": ROUNDED}, ("none",)
    return Stream(
        settings_from(workload, run, {"max_bytes": STORE_BYTES}),
        requests,
        only=(BASE, *only) if only else (),
    )


def arms_of(
    config: SemanticCacheConfig, repeat: int = 1
) -> Mapping[str, tuple[Arm, SemanticCacheConfig | None]]:
    """The arms by name: nothing reused, prefix caching, and blend at each quality; where prompts
    come again, blend at the default quality also with idle time behind each request
    (`PROMOTING`).
    """
    arms: dict[str, tuple[Arm, SemanticCacheConfig | None]] = {
        "none": ("none", None),
        "prefix": ("prefix", None),
    }
    for name in QUALITIES:
        arms[name] = ("cache", replace(config, reuse="blend", blend_quality=name))
    if repeat > 1:
        arms[PROMOTING] = ("cache", replace(config, reuse="blend"))
    return arms


def in_folder(config: SemanticCacheConfig, folder: Path, quality: str) -> SemanticCacheConfig:
    """The config with its state below `folder`, apart from the other arms'."""
    return replace(config, cache_dir=str(folder / quality))


def chosen_of(stream: Stream) -> tuple[list[Sample], SamplePrompter, int]:
    """The stream's samples, what renders them, and the sum of their prompt tokens.

    Raises: DatasetError if too few samples have the right length.
    """
    settings = stream.settings
    templates = open_templates(settings)
    prompter = SamplePrompter(templates, settings.prompt_template, settings.chunk_source)
    tokenizer: Any = getattr(templates, "tokenizer", templates)
    least, most = stream.lengths
    chosen: list[Sample] = []
    total = 0
    for sample in read_samples(settings):
        count = len(tokenizer(prompter.prompt(sample), add_special_tokens=False)["input_ids"])
        if least <= count <= most:
            chosen.append(sample)
            total += count
        if len(chosen) == stream.requests:
            return list(repeated(chosen, settings.repeat)), prompter, total * settings.repeat
    raise DatasetError(
        f"{settings.dataset} has {len(chosen)} prompts of {least} to {most} tokens among the first"
        f" {settings.max_samples}: ask for fewer with --requests"
    )
