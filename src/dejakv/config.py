"""Settings of the cache, by part: find, blend, keep, trust. Each default stands once, in the class of its part.

Command line, environment of the server, keys of vLLM's connector and docs/reference/settings.md are made from these classes; each docstring
holds the help text of each field.
"""

import os
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any, Literal

from dejakv.blend.settings import (
    DEFAULT,
    MAP,
    MAX_GENERATION,
    TOP_LAYER_TAIL,
    BlendMap,
    BlendQuality,
    BlendQualitySettings,
    BlendSelector,
    quality_of,
)
from dejakv.errors import ConfigError
from dejakv.settings import (
    Address,
    Cosine,
    Count,
    Folder,
    Place,
    Positive,
    Seconds,
    Share,
    beside,
    check_fields,
    from_mapping,
    in_bucket,
    is_memory,
    shown,
)
from dejakv.store.budgets import PartitionBudgets, named_parts
from dejakv.trust.differs import differs_of
from dejakv.trust.settings import TrustSettings

MediaPolicy = Literal["exact", "similar", "ignore"]
LayerMatch = Literal["all", "any", "mean"]
IndexKind = Literal["flat", "hnsw"]
ReuseMethod = Literal["exact", "adopt", "blend", "top_layer"]
Answers = Literal["compute", "keep"]
PrunePolicy = Literal["none", "attention", "snapkv"]
EvictionPolicy = Literal["lru", "lfu"]
KVQuantization = Literal["none", "int8"]

OFF = "DEJAKV_OFF"


def switched_off() -> str:
    """Why nothing may be reused or stored, by the environment variable `DEJAKV_OFF`; empty if reuse is on. Asked where a cache is made.

    Raises: ConfigError for another value than 0 or 1.
    """
    value = os.environ.get(OFF, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{OFF}={value}: set it to 1, so that nothing is reused or stored, or to 0")
    return f"switched off: {OFF}=1" if value == "1" else ""


DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
SIMILARITY_THRESHOLD = 0.85
"""Least cosine of a level that is given none."""

_GUARD = "no cross-encoder judges paraphrases; lexical_guard alone refuses donors in other words"
LEFT: dict[str, str] = {"cross_encoder": _GUARD, "paraphrase_threshold": _GUARD}
"""Settings of earlier versions, and what took the place of each."""
FORMER = {"cache_dir": "store"}
"""Former names of settings, which still do."""


def take_former(settings: object, value: str | None, former: str = "cache_dir") -> None:
    """Take `store` from its former name. Raises: ConfigError if both are given."""
    if value is not None:
        if getattr(settings, "store", None) is not None:
            raise ConfigError(f"{former} is the former name of store: give store alone")
        # The class is frozen, and this is part of its construction.
        object.__setattr__(settings, "store", value)


def check_bucket(store: str | None, **settings: object) -> None:
    """Refuse settings of a bucket for a store elsewhere. Raises: ConfigError"""
    for name, value in settings.items():
        # Refused rather than ignored: who gives it expects it to have an effect.
        if value is not None and not (store and in_bucket(store)):
            raise ConfigError(f"{name}={shown(value)} is of a bucket, and store={shown(store)} is none: leave it out")


@dataclass(frozen=True)
class TextSettings:
    """Find and judge prompts in other words.

    similarity_threshold  least cosine for the semantic text level, -1 to 1; 1: equal text alone
    index_encoder         sentence-transformers name or folder; `model`: the served model's own input embeddings
    encoder_threads       threads of the sentence encoder; 0: one
    chunk_window          characters of the compared text to embed; 0: all
    copied_text           let blend search for runs of tokens anywhere in stored prompts
    lexical_guard         refuse donors with other content words, numbers, polarity or type of question
    """

    similarity_threshold: Cosine = SIMILARITY_THRESHOLD
    index_encoder: str = DEFAULT_ENCODER
    encoder_threads: Count = 0
    chunk_window: Count = 0
    copied_text: bool = True
    lexical_guard: bool = True


@dataclass(frozen=True)
class FindSettings(TextSettings):
    """Find donors. A threshold of 0 accepts any donor not opposed to the prompt.

    media             donors with other pictures: `exact` (never), `similar` (the vision layer decides) or `ignore` (allowed, as in the
                      prototypes; wrong answers on other pictures, and reports say so)
    exact_prefix      look for exact token prefixes
    exact_text        look for equal text
    semantic_text     look for similar text, with `index_encoder`; None: with `adopt`, `top_layer`, a blend without `copied_text`, or
                      another encoder than the default
    image_encoder     encoder of the layer `vision`: sentence-transformers name or folder of a CLIP model; `model`: the served model's
                      tower; None: CLIP if it can be loaded, else the tower (for a dimension `auto` the tower first)
    index             vector index: `flat` or `hnsw`
    embedding_layers  latent layers as `NAME:DIM[:THRESHOLD]`
    embedding_hook    source of the layers' vectors: `none`, `prompt`, `vision`, `prompt_vision` or `package.module:factory`
    embedding_match   combination of layers: `all`, `any` or `mean`
    levels            further levels as `package.module:factory`, called with the config
    """

    media: MediaPolicy = "exact"
    exact_prefix: bool = True
    exact_text: bool = True
    semantic_text: bool | None = None
    image_encoder: str | None = None
    index: IndexKind = "flat"
    embedding_layers: tuple[str, ...] = ()
    embedding_hook: str = "none"
    embedding_match: LayerMatch = "all"
    levels: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlendSettings:
    """Blend donors' state with computed rows. Also keys of vLLM's connector.

    min_gain        least tokens to save: for an approximate plan beyond the exact prefix (`adopt`: of the whole prompt), in vLLM for a
                    load beyond vLLM's own prefix hit
    blend_quality   `strict` (more recomputed tokens, closer to full computation), `default`, or `loose` (fewer, faster; only for prompts
                    whose passages stay in place)
    blend_share     share of tokens to recompute, more where more has changed; None: the quality's
    blend_selector  ranking of tokens for recomputation; None: the quality's
    blend_map       token map
    blend_donors    maximum donors of a blend
    max_generation  maximum generation of approximate KV entries in a blend; 0: a blend's own rows are not kept
    """

    min_gain: Count = 16
    blend_quality: BlendQuality = DEFAULT
    blend_share: Share | None = None
    blend_selector: BlendSelector | None = None
    blend_map: BlendMap = MAP
    blend_donors: Positive = 16
    max_generation: Count = MAX_GENERATION

    @property
    def blend(self) -> BlendQualitySettings:
        """Ranking of a blend's tokens, and the share to recompute."""
        return quality_of(self.blend_quality, self.blend_selector, self.blend_share)


@dataclass(frozen=True)
class ReuseSettings(BlendSettings):
    """Reuse donors.

    reuse           `exact` (same answer: docs/explanation/exactness.md), `adopt` (answer a similar donor's prompt instead), `blend` (take a donor's KV
                    entries token by token and recompute the rest) or `top_layer` (take the top layer's KV alone, in a layer-condensed
                    model such as docs-lckv)
    answers         `compute`, or `keep`: return the stored greedy answer of an equal prompt at once, with `adopt` that of a similar one
    top_layer_tail  last tokens of a prompt, the question, always computed by `top_layer`
    free_order      rearrange parts of a prompt if the request allows it
    costs           seconds of a token, a pair of tokens, a loaded byte and a blended token, for reproducible plans; empty: measured
    prune           decode from the most important tokens, layer by layer: `none`, `attention` or `snapkv`; approximate
    """

    reuse: ReuseMethod = "exact"
    answers: Answers = "compute"
    top_layer_tail: Positive = TOP_LAYER_TAIL
    free_order: bool = True
    costs: tuple[Seconds, ...] = ()
    prune: PrunePolicy = "none"


@dataclass(frozen=True)
class LifetimeSettings:
    """Lifetime of stored entries. Also keys of vLLM's connectors.

    ttl  seconds for which an entry may be used after its computation; 0: no limit. A request may shorten it for its own entries
    """

    ttl: Seconds = 0.0


@dataclass(frozen=True)
class BudgetSettings(LifetimeSettings):
    """Place and size of the store. Also keys of vLLM's connector.

    store           a folder, `memory:`, `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`, with the credentials of the
                    environment; None: memory
    disk_dir        folder on this machine with copies from a bucket, and with its index, which makes opening fast; None: no copies
    feed            Redis or Valkey (`redis://HOST:PORT/DB`) by which the machines of a bucket tell each other at once what they store and
                    remove; None: each lists the bucket
    compress        put state into a bucket in fewer bytes, without loss: for links below 2 to 3.5 Gbit/s
    max_bytes       maximum bytes of the store
    disk_bytes      maximum bytes of copies in `disk_dir`
    memory_bytes    bytes of a store on disk or in a bucket to keep in memory too
    policy          eviction policy: `lru` or `lfu`
    min_tokens      least tokens of a stored prompt
    second_sight    store a prompt only when it comes the second time
    max_write_rate  maximum bytes a second written by the store; 0: no limit
    """

    store: Place | None = None
    disk_dir: Folder | None = None
    feed: Address | None = None
    compress: bool = False
    max_bytes: Count = 4 * 1024**3
    disk_bytes: Count = 16 * 1024**3
    memory_bytes: Count = 512 * 1024**2
    policy: EvictionPolicy = "lru"
    min_tokens: Count = 0
    second_sight: bool = False
    max_write_rate: Count = 0


@dataclass(frozen=True)
class KeepSettings(BudgetSettings):
    """Storage of state and encoder outputs, and its division.

    kv_quantization      `int8`: store KV entries in 8 bits, for blends alone; nothing is reused exactly
    max_cached_blocks    maximum entries of the store; 0: no limit
    partitions           number of parts of the budgets, quotas included; each partition is limited to one part and evicts only its own
                         entries; 1: one budget for all
    quotas               parts of named partitions: `NAME=BYTES` or `NAME=BYTES:ENTRIES`; the same share of memory and encoder outputs
    ttl_prompts          `ttl` of exact state of prompts; None: `ttl`
    ttl_rows             `ttl` of KV entries computed by blends, never longer than their donors'; None: `ttl`
    ttl_encoder          `ttl` of encoder outputs; None: `ttl`
    ttl_fusion           `ttl` of states of fusion modules; None: `ttl`
    enable_fusion_cache  keep encoder outputs by the pictures' content; None: if there is a `fusion_cache_dir` or `fusion_provider`
    fusion_provider      reader and writer of the model's own fusion modules, `package.module:factory`
    fusion_cache_dir     place of encoder outputs, as `store`; None: memory
    encoder_bytes        maximum bytes of encoder outputs; as many again for a provider's states in memory
    image_root           folder of the samples' pictures
    """

    kv_quantization: KVQuantization = "none"
    max_cached_blocks: Count = 0
    partitions: Positive = 1
    quotas: tuple[str, ...] = ()
    ttl_prompts: Seconds | None = None
    ttl_rows: Seconds | None = None
    ttl_encoder: Seconds | None = None
    ttl_fusion: Seconds | None = None
    enable_fusion_cache: bool | None = None
    fusion_provider: str | None = None
    fusion_cache_dir: Place | None = None
    encoder_bytes: Count = 1024**3
    image_root: Folder | None = None
    cache_dir: InitVar[str | None] = None

    @property
    def quantizes(self) -> bool:
        """Whether KV entries are stored in fewer bits."""
        return self.kv_quantization != "none"

    @property
    def parts(self) -> PartitionBudgets:
        """Budgets of each partition. Raises: ConfigError for a partition without a part."""
        return PartitionBudgets(self.partitions, self.max_bytes, self.max_cached_blocks, named_parts(self.quotas))

    @property
    def own_folder(self) -> str | None:
        """Folder on this machine for files beside the store; None: the store is in memory, or in a bucket without `disk_dir`."""
        if self.store is None or is_memory(self.store):
            return None
        # SQLite files cannot stand in a bucket.
        return self.disk_dir if in_bucket(self.store) else self.store

    @property
    def fusion_states_dir(self) -> str | None:
        """Place of a provider's states, beside that of encoder outputs; None without."""
        place = self.fusion_cache_dir if self.fusion_provider else None
        return place and (place if is_memory(place) else beside(place, "-states"))

    def lifetime(self, class_ttl: float | None) -> float:
        """Limit of a class of entries, by default `ttl`."""
        # None and not falsy: 0 is a value of its own, no limit.
        return self.ttl if class_ttl is None else class_ttl


@dataclass(frozen=True)
class SemanticCacheConfig(FindSettings, ReuseSettings, KeepSettings, TrustSettings):
    """Settings of a `HierarchicalCache`. Raises: ConfigError for a wrong value, or values that exclude each other.

    >>> config = SemanticCacheConfig(reuse="blend", blend_quality="strict")
    >>> config.blend.share, config.similarity_threshold, config.ttl
    (0.4, 0.85, 0.0)
    """

    def __post_init__(self, cache_dir: str | None) -> None:
        # Before the checks: a former name may give the value that is checked.
        take_former(self, cache_dir)
        check_fields(self)
        check_bucket(self.store, disk_dir=self.disk_dir, feed=self.feed, compress=self.compress or None)
        if self.enable_fusion_cache is None:
            object.__setattr__(self, "enable_fusion_cache", bool(self.fusion_cache_dir or self.fusion_provider))
        # Semantic text costs an encoder: only methods that take similar prompts get it unasked.
        if self.semantic_text is None:
            needed = self.reuse in ("adopt", "top_layer") or (self.reuse == "blend" and not self.copied_text)
            object.__setattr__(self, "semantic_text", needed or self.index_encoder != DEFAULT_ENCODER)

        self._check_reuse()
        if self.quantizes:
            self._check_quantization()
        _ = self.parts  # raises where a partition has none
        if self.media == "similar" and not any(layer.split(":")[0] == "vision" for layer in self.embedding_layers):
            raise ConfigError(
                "media='similar' lets the vision layer decide, but there is none: add vision:DIM:THRESHOLD to embedding_layers "
                "(--embedding-layer), and give embedding_hook (--embedding-hook) vision or prompt_vision"
            )
        self._check_bound()

    def _check_reuse(self) -> None:
        if self.answers == "keep" and self.prune != "none":
            raise ConfigError(
                f"answers=keep returns answers of whole state, and prune={self.prune} decodes from a part: leave one of them out"
            )
        if self.reuse == "top_layer" and self.prune != "none":
            raise ConfigError(
                f"prune={self.prune} drops rows of the state that reuse=top_layer takes from others: leave one of them out"
            )
        if len(self.costs) not in (0, 4):
            raise ConfigError(
                f"costs={shown(self.costs)} are {len(self.costs)} constants: give four, the seconds of a token, of a pair of tokens, "
                "of a byte loaded and of a token blended, or none to measure them"
            )

    def _check_quantization(self) -> None:
        needed = {"reuse": "blend", "copied_text": True, "answers": "compute"}
        for name, value in needed.items():
            if getattr(self, name) != value:
                raise ConfigError(
                    f"kv_quantization={self.kv_quantization} keeps donors of blends alone, found by copied text, and "
                    f"{name}={getattr(self, name)}: set {name} to {value}, or leave kv_quantization out"
                )

        if not self.max_generation:
            raise ConfigError(
                f"kv_quantization={self.kv_quantization} keeps state of generation 1 and more, and max_generation=0 allows none: leave one of "
                "them out"
            )

    def _check_bound(self) -> None:
        self.groups()
        differs_of(self.differs)
        if self.prune != "none" and (self.error_bound is not None or self.certificate is not None):
            raise ConfigError(
                f"error_bound and certificate are bounds on reuse, and prune={self.prune} changes answers without any: leave one out"
            )

    @property
    def finds_prefixes(self) -> bool:
        return self.exact_prefix and not self.quantizes

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SemanticCacheConfig":
        """Build a config from plain values (JSON, flags; lists become tuples). Raises: ConfigError for an unknown name."""
        return from_mapping(cls, values, "the cache's settings", LEFT)
