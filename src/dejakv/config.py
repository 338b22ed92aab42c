"""Settings of the cache, by part: find, blend, keep, trust.

Each default stands once, in the class of its part. Command line, environment of the server, keys of
vLLM's connector and docs/reference/settings.md are made from these classes; the text below each
field is its help.
"""

import math
import os
from collections.abc import Mapping
from typing import Any, Literal

from dejakv import plugins
from dejakv.blend.settings import (
    DEFAULT,
    MAP,
    MAX_GENERATION,
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
    MethodName,
    Place,
    Positive,
    Seconds,
    Share,
    display,
    from_mapping,
    in_bucket,
    is_memory,
    sibling_place,
    strict_dataclass,
)
from dejakv.store.budgets import SNAPSHOT_SHARE, PartitionBudgets, parse_quotas
from dejakv.trust.differs import differs_of
from dejakv.trust.settings import TrustSettings

MediaPolicy = Literal["exact", "similar", "ignore"]
LayerMatch = Literal["all", "any", "mean"]
IndexKind = Literal["flat", "hnsw"]
Answers = Literal["compute", "keep"]
GeneratedText = Literal["keep", "off"]
PrunePolicy = Literal["none", "attention", "snapkv"]
EvictionPolicy = Literal["lru", "lfu"]

OFF = "DEJAKV_OFF"


def switched_off() -> str:
    """Read the environment variable `DEJAKV_OFF`.

    Returns
    -------
    str
        Why nothing may be reused or stored; empty if reuse is on.

    Raises
    ------
    ConfigError
        For another value than 0 or 1.
    """
    value = os.environ.get(OFF, "")
    if value not in ("", "0", "1"):
        raise ConfigError(
            f"{OFF}={value}: set it to 1, so that nothing is reused or stored, or to 0"
        )
    return f"switched off: {OFF}=1" if value == "1" else ""


DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
SIMILARITY_THRESHOLD = 0.85
"""Default of the least cosine of the semantic text level."""

_GUARD = "no cross-encoder judges paraphrases; lexical_guard alone refuses donors in other words"
_EXACT_BYTES = (
    "with it nothing was reused exactly; compress, and vLLM's --kv-cache-dtype, take fewer bytes"
    " too"
)
REMOVED_SETTINGS: dict[str, str] = {
    "cross_encoder": _GUARD,
    "kv_quantization": _EXACT_BYTES,
    "paraphrase_threshold": _GUARD,
}
"""Settings of earlier versions, and what took the place of each."""
FORMER = {"cache_dir": "store"}
"""Former names of settings, which are still accepted, and the names of today."""


def check_bucket(store: str | None, **settings: object) -> None:
    """Raise ConfigError if a setting that only buckets have is given, and `store` is no bucket.

    Parameters
    ----------
    store : str or None
        Address of the store.
    **settings : object
        Settings by name; None stands for one that is not given.
    """
    for name, value in settings.items():
        # Refused rather than ignored: who gives it expects it to have an effect.
        if value is not None and not (store and in_bucket(store)):
            raise ConfigError(
                f"{name}={display(value)} is of a bucket, and store={display(store)} is none: "
                f"leave it out"
            )


@strict_dataclass()
class TextSettings:
    """Find and judge prompts in other words."""

    similarity_threshold: Cosine = SIMILARITY_THRESHOLD
    """least cosine for the semantic text level, -1 to 1; 1: equal text alone"""
    index_encoder: str = DEFAULT_ENCODER
    """sentence-transformers name or folder; `model`: the served model's own input embeddings"""
    encoder_threads: Count = 0
    """threads of the sentence encoder; 0: one"""
    chunk_window: Count = 0
    """characters of the compared text to embed; 0: all"""
    copied_text: bool = True
    """let blend search for runs of tokens anywhere in stored prompts"""
    lexical_guard: bool = True
    """refuse donors with other content words, numbers, polarity or type of question"""


@strict_dataclass()
class FindSettings(TextSettings):
    """Find donors. A threshold of 0 accepts any donor not opposed to the prompt."""

    media: MediaPolicy = "exact"
    """donors with other pictures: `exact` (never), `similar` (the vision layer decides) or `ignore`
    (allowed, as in the prototypes; wrong answers on other pictures, and reports say so)"""
    exact_prefix: bool = True
    """look for exact token prefixes"""
    exact_text: bool = True
    """look for equal text"""
    semantic_text: bool | None = None
    """look for similar text, with `index_encoder`; None: with `adopt`, `top_layer`, a blend without
    `copied_text`, or another encoder than the default"""
    image_encoder: str | None = None
    """encoder of the layer `vision`: sentence-transformers name or folder of a CLIP model; `model`:
    the served model's tower; None: CLIP if it can be loaded, else the tower (for a dimension `auto`
    the tower first)"""
    index: IndexKind = "flat"
    """vector index: `flat` or `hnsw`"""
    embedding_layers: tuple[str, ...] = ()
    """latent layers as `NAME:DIM[:THRESHOLD]`"""
    embedding_hook: str = "none"
    """source of the layers' vectors: `none`, `prompt`, `vision`, `prompt_vision` or
    `package.module:factory`"""
    embedding_match: LayerMatch = "all"
    """combination of layers: `all`, `any` or `mean`"""
    levels: tuple[str, ...] = ()
    """further levels as `package.module:factory`, called with the config"""


@strict_dataclass()
class BlendSettings:
    """Blend donors' state with computed rows. Also keys of vLLM's connector."""

    min_gain: Count = 16
    """least tokens to save: for an approximate plan beyond the exact prefix (`adopt`: of the whole
    prompt), in vLLM for a load beyond vLLM's own prefix hit"""
    min_gain_share: Share = 0.25
    """least share of the tokens behind the exact prefix that a blend saves; 0: `min_gain` alone
    counts"""
    blend_quality: BlendQuality = DEFAULT
    """`strict` (more recomputed tokens, closer to full computation), `default`, or `loose` (fewer,
    faster; only for prompts whose passages stay in place)"""
    blend_share: Share | None = None
    """share of tokens to recompute, more where more has changed; None: the quality's"""
    blend_selector: BlendSelector | None = None
    """ranking of tokens for recomputation; None: the quality's"""
    blend_map: BlendMap = MAP
    """token map"""
    blend_donors: Positive = 16
    """maximum donors of a blend"""
    foreign_context: Count | None = None
    """tokens of other text, which the prompt lacks, that the state of copied text may have been
    computed behind; text behind more of them is computed anew; None: any number"""
    max_generation: Count = MAX_GENERATION
    """maximum generation of approximate KV entries in a blend; 0: a blend's own rows are not kept
    """

    @property
    def blend(self) -> BlendQualitySettings:
        """Ranking of a blend's tokens, and the share to recompute."""
        return quality_of(self.blend_quality, self.blend_selector, self.blend_share)

    def least_blend_gain(self, tokens: int) -> int:
        """Return the tokens that a blend must save where `tokens` would be computed without it.

        Where a prompt only grows, what its newest message has in common with earlier text is a few
        tokens: these save no time, and change answers all the same (docs/results/agents.md).
        """
        return max(self.min_gain, math.ceil(self.min_gain_share * tokens))


@strict_dataclass()
class ReuseSettings(BlendSettings):
    """Reuse donors."""

    reuse: MethodName = "exact"
    """`exact` (same answer: docs/explanation/exactness.md), `adopt` (answer a similar donor's
    prompt instead), `blend` (take a donor's KV entries token by token and recompute the rest) or
    `top_layer` (take the top layer's KV alone, in a layer-condensed model such as docs-lckv), or a
    registered method of your own"""
    answers: Answers = "compute"
    """`compute`, or `keep`: return the stored greedy answer of an equal prompt at once, with
    `adopt` that of a similar one"""
    top_layer_tail: Positive = 32
    """last tokens of a prompt, the question, always computed by `top_layer`"""
    free_order: bool = True
    """rearrange parts of a prompt if the request allows it"""
    costs: tuple[Seconds, ...] = ()
    """seconds of a token, a pair of tokens, a loaded byte and a blended token, for reproducible
    plans; empty: measured"""
    prune: PrunePolicy = "none"
    """decode from the most important tokens, layer by layer: `none`, `attention` or `snapkv`;
    approximate"""


@strict_dataclass()
class LifetimeSettings:
    """Lifetime of stored entries. Also keys of vLLM's connectors."""

    ttl: Seconds = 0.0
    """seconds for which an entry may be used after its computation; 0: no limit. A request may
    shorten it for its own entries"""


@strict_dataclass()
class BudgetSettings(LifetimeSettings):
    """Place and size of the store. Also keys of vLLM's connector."""

    store: Place | None = None
    """a folder, `memory:`, `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`,
    with the credentials of the environment; None: memory"""
    disk_dir: Folder | None = None
    """folder on this machine with copies from a bucket, and with its index, which makes opening
    fast; None: no copies"""
    feed: Address | None = None
    """Redis or Valkey (`redis://HOST:PORT/DB`) by which the machines of a bucket tell each other at
    once what they store and remove; None: each lists the bucket"""
    compress: bool = False
    """put state into a bucket in fewer bytes, without loss: for links below 2 to 3.5 Gbit/s"""
    max_bytes: Count = 4 * 1024**3
    """maximum bytes of the store"""
    disk_bytes: Count = 16 * 1024**3
    """maximum bytes of copies in `disk_dir`"""
    memory_bytes: Count = 512 * 1024**2
    """bytes of a store on disk or in a bucket to keep in memory too"""
    policy: EvictionPolicy = "lru"
    """eviction policy: `lru` or `lfu`"""
    min_tokens: Count = 0
    """least tokens of a stored prompt"""
    second_sight: bool = False
    """store a prompt only when it comes the second time"""
    max_write_rate: Count = 0
    """maximum bytes a second written by the store; 0: no limit"""


@strict_dataclass(former_names=FORMER)
class KeepSettings(BudgetSettings):
    """Storage of state and encoder outputs, and its division."""

    generated_text: GeneratedText = "off"
    """`keep`: store the state of answers too, so that a chat's next prompt computes its new
    messages alone (in low precision and behind approximate answers by idle time); `off`: that of
    prompts"""
    max_cached_blocks: Count = 0
    """maximum entries of the store; 0: no limit"""
    snapshot_share: Share = SNAPSHOT_SHARE
    """largest part of `max_bytes`, and of each partition's, for snapshots of recurrent layers;
    those leave first that save least for their bytes"""
    partitions: Positive = 1
    """number of parts of the budgets, quotas included; each partition is limited to one part and
    evicts only its own entries; 1: one budget for all"""
    quotas: tuple[str, ...] = ()
    """parts of named partitions: `NAME=BYTES` or `NAME=BYTES:ENTRIES`; the same share of memory and
    encoder outputs"""
    ttl_prompts: Seconds | None = None
    """`ttl` of exact state of prompts; None: `ttl`"""
    ttl_rows: Seconds | None = None
    """`ttl` of KV entries computed by blends, never longer than their donors'; None: `ttl`"""
    ttl_encoder: Seconds | None = None
    """`ttl` of encoder outputs; None: `ttl`"""
    ttl_fusion: Seconds | None = None
    """`ttl` of states of fusion modules; None: `ttl`"""
    enable_fusion_cache: bool | None = None
    """keep encoder outputs by the pictures' content; None: if there is a `fusion_cache_dir` or
    `fusion_provider`"""
    fusion_provider: str | None = None
    """reader and writer of the model's own fusion modules, `package.module:factory`"""
    fusion_cache_dir: Place | None = None
    """place of encoder outputs, as `store`; None: memory"""
    encoder_bytes: Count = 1024**3
    """maximum bytes of encoder outputs; as many again for a provider's states in memory"""
    image_root: Folder | None = None
    """folder of the samples' pictures"""

    @property
    def parts(self) -> PartitionBudgets:
        """Budgets of the partitions.

        Raises
        ------
        ConfigError
            A partition has no part, or a quota cannot be read.
        """
        return PartitionBudgets(
            self.partitions, self.max_bytes, self.max_cached_blocks, parse_quotas(self.quotas)
        )

    @property
    def own_folder(self) -> str | None:
        """Folder on this machine for files beside the store.

        None if the store is in memory, or in a bucket without `disk_dir`.
        """
        if self.store is None or is_memory(self.store):
            return None
        # SQLite files cannot stand in a bucket.
        return self.disk_dir if in_bucket(self.store) else self.store

    @property
    def fusion_states_dir(self) -> str | None:
        """Place of a provider's states, beside that of encoder outputs.

        None without a provider, or where encoder outputs are in memory by default.
        """
        place = self.fusion_cache_dir if self.fusion_provider else None
        return place and (place if is_memory(place) else sibling_place(place, "-states"))

    def lifetime(self, class_ttl: float | None) -> float:
        """Return for how many seconds a class of entries may be used; 0: no limit.

        Parameters
        ----------
        class_ttl : float or None
            Setting of the class, such as `ttl_rows`; None takes `ttl`.
        """
        # None and not falsy: 0 is a value of its own, no limit.
        return self.ttl if class_ttl is None else class_ttl


@strict_dataclass()
class SemanticCacheConfig(FindSettings, ReuseSettings, KeepSettings, TrustSettings):
    """Settings of a `HierarchicalCache`.

    Raises
    ------
    ConfigError
        For a wrong value, and for values that exclude each other.

    Examples
    --------
    >>> config = SemanticCacheConfig(reuse="blend", blend_quality="strict")
    >>> config.blend.share, config.similarity_threshold, config.ttl
    (0.4, 0.85, 0.0)
    """

    def __post_init__(self) -> None:
        check_bucket(
            self.store, disk_dir=self.disk_dir, feed=self.feed, compress=self.compress or None
        )
        if self.enable_fusion_cache is None:
            object.__setattr__(
                self, "enable_fusion_cache", bool(self.fusion_cache_dir or self.fusion_provider)
            )
        # Semantic text costs an encoder: only methods that take similar prompts get it unasked.
        if self.semantic_text is None:
            needed = plugins.load(plugins.METHODS, self.reuse).needs_similar_text(self)
            object.__setattr__(
                self, "semantic_text", needed or self.index_encoder != DEFAULT_ENCODER
            )

        self._check_reuse()
        _ = self.parts  # raises where a partition has none
        if self.media == "similar" and not any(
            layer.split(":")[0] == "vision" for layer in self.embedding_layers
        ):
            raise ConfigError(
                "media='similar' lets the vision layer decide, but there is none: add "
                "vision:DIM:THRESHOLD to embedding_layers "
                "(--embedding-layer), and give embedding_hook (--embedding-hook) vision or "
                "prompt_vision"
            )
        self._check_bound()

    def _check_reuse(self) -> None:
        if self.answers == "keep" and self.prune != "none":
            raise ConfigError(
                f"answers=keep returns answers of whole state, and prune={self.prune} decodes "
                f"from a part: leave one of them out"
            )
        plugins.load(plugins.METHODS, self.reuse).check(self)
        if len(self.costs) not in (0, 4):
            raise ConfigError(
                f"costs={display(self.costs)} are {len(self.costs)} constants: give four, the "
                f"seconds of a token, of a pair of tokens, "
                "of a byte loaded and of a token blended, or none to measure them"
            )

    def _check_bound(self) -> None:
        self.groups()
        differs_of(self.differs)
        if self.prune != "none" and (self.error_bound is not None or self.certificate is not None):
            raise ConfigError(
                f"error_bound and certificate are bounds on reuse, and prune={self.prune} "
                f"changes answers without any: leave one out"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SemanticCacheConfig":
        """Build a config from plain values (JSON, flags). Lists become tuples.

        Parameters
        ----------
        values : Mapping[str, Any]
            Settings by name.

        Returns
        -------
        SemanticCacheConfig
            The config, checked.

        Raises
        ------
        ConfigError
            For an unknown name, and for a wrong value.
        """
        return from_mapping(cls, values, "the cache's settings", REMOVED_SETTINGS)
