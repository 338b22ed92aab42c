"""Every setting of the cache, by part: find, blend, keep, trust. Each default stands once, in the class of its part.

The command line, the server's environment, the keys of vLLM's connector and docs/settings.md are made from these classes: a docstring
has an entry for each field, which is also its help text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dejakv.blend.settings import (
    DEFAULT,
    MAP,
    MAX_GENERATION,
    TOP_LAYER_TAIL,
    BlendMap,
    BlendQuality,
    BlendSelector,
    Quality,
    quality_of,
)
from dejakv.errors import ConfigError
from dejakv.settings import Cosine, Count, Folder, Positive, Seconds, Share, check_fields, from_mapping, shown
from dejakv.store.budgets import Parts, named_parts
from dejakv.trust.differs import differs_of
from dejakv.trust.settings import TrustSettings

MediaPolicy = Literal["exact", "similar", "ignore"]
LayerMatch = Literal["all", "any", "mean"]
IndexKind = Literal["flat", "hnsw", "lsh"]
ReuseMethod = Literal["exact", "adopt", "blend", "top_layer"]
PrunePolicy = Literal["none", "attention", "snapkv", "random"]
EvictionPolicy = Literal["lru", "lfu"]

DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
SIMILARITY_THRESHOLD = 0.85
"""Least cosine of a level that is given none."""

_GUARD = "no cross-encoder judges paraphrases; lexical_guard alone refuses donors in other words"
LEFT: dict[str, str] = {"cross_encoder": _GUARD, "paraphrase_threshold": _GUARD}
"""Settings of earlier versions, and what took the place of each."""


@dataclass(frozen=True)
class TextSettings:
    """Find prompts with other words, and judge them.

    similarity_threshold  least cosine that the semantic text level accepts, -1 to 1
    index_encoder         sentence-transformers name or folder; `model`: the served model's own input embeddings
    encoder_threads       threads of the sentence encoder; 0: one
    chunk_window          characters of the compared text to embed; 0: all
    copied_text           let blend look for runs of tokens that stand anywhere in stored prompts
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
    """Find donors. A threshold of 0 is a threshold: it accepts what is not opposed.

    media             donors with other pictures: `exact` (never), `similar` (the vision layer decides) or `ignore` (allowed, as in the
                      prototypes; wrong answers on other pictures, and reports say so)
    exact_prefix      look for exact token prefixes
    exact_text        look for equal text
    semantic_text     look for similar text, which loads `index_encoder`; None: only where it is needed, which is for `adopt` and
                      `top_layer`, for a blend without `copied_text`, and wherever another encoder than the default is chosen
    image_encoder     of the layer `vision`: sentence-transformers name or folder of a CLIP model; `model`: the served model's
                      tower; None: CLIP if it can be loaded, else the tower (for a dimension `auto` the tower first)
    index             of vectors: `flat`, `hnsw` or `lsh`
    embedding_layers  latent layers as `NAME:DIM[:THRESHOLD]`
    embedding_hook    source of the layers' vectors: `none`, `prompt`, `vision`, `prompt_vision` or `package.module:factory`
    embedding_match   how layers are combined: `all`, `any` or `mean`
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
    """Blend: what is taken from donors, and what is computed. Also keys of vLLM's connector.

    min_gain        fewest tokens that reuse must save: an approximate plan beyond the exact prefix (`adopt`: of the whole prompt), in
                    vLLM a load beyond vLLM's own prefix hit
    blend_quality   `strict` (more recomputed tokens, closer to full computation), `default`, or `loose` (fewer, faster; only for prompts
                    whose passages stay in place)
    blend_share     share of tokens to recompute, more where more has changed; None: the quality's
    blend_selector  how tokens are ranked for recomputation; None: the quality's
    blend_map       token map
    blend_donors    most prompts that a blend takes state of
    max_generation  how often approximate state may have gone into KV entries that serve a blend; 0: a blend's own are not kept
    """

    min_gain: Count = 16
    blend_quality: BlendQuality = DEFAULT
    blend_share: Share | None = None
    blend_selector: BlendSelector | None = None
    blend_map: BlendMap = MAP
    blend_donors: Positive = 16
    max_generation: Count = MAX_GENERATION

    @property
    def blend(self) -> Quality:
        """What ranks the tokens of a blend and how many are recomputed."""
        return quality_of(self.blend_quality, self.blend_selector, self.blend_share)


@dataclass(frozen=True)
class ReuseSettings(BlendSettings):
    """Reuse a donor, and what that must be worth.

    reuse           `exact` (same answer: docs/exactness.md), `adopt` (answer a similar donor's prompt instead), `blend` (take a donor's KV
                    entries token by token and recompute the rest) or `top_layer` (take the top layer's KV alone, in a layer-condensed
                    model such as docs-lckv)
    top_layer_tail  tokens at the end of a prompt that `top_layer` always computes: where the question stands
    free_order      rearrange parts of a prompt where the request says that their order is free
    costs           seconds of a token, of a pair of tokens, of a byte loaded, of a token blended, for runs that must choose alike; empty:
                    measured
    prune           decode from the tokens that matter most, layer by layer: `none`, `attention`, `snapkv` or `random` (a control);
                    approximate
    """

    reuse: ReuseMethod = "exact"
    top_layer_tail: Positive = TOP_LAYER_TAIL
    free_order: bool = True
    costs: tuple[Seconds, ...] = ()
    prune: PrunePolicy = "none"


@dataclass(frozen=True)
class LifetimeSettings:
    """For how long what is stored may be used. Also keys of vLLM's connectors.

    ttl  seconds for which an entry may be used after it was computed; 0: no limit. A request may shorten it for what it leaves
    """

    ttl: Seconds = 0.0


@dataclass(frozen=True)
class BudgetSettings(LifetimeSettings):
    """How much is kept. Also keys of vLLM's connector.

    max_bytes       largest size of the store in bytes
    memory_bytes    of a store on disk, bytes that are kept in memory too
    policy          eviction policy: `lru` or `lfu`
    min_tokens      shorter prompts are not stored
    second_sight    store a prompt only when it comes the second time
    max_write_rate  bytes a second that the store may write; 0: no limit
    """

    max_bytes: Count = 4 * 1024**3
    memory_bytes: Count = 512 * 1024**2
    policy: EvictionPolicy = "lru"
    min_tokens: Count = 0
    second_sight: bool = False
    max_write_rate: Count = 0


@dataclass(frozen=True)
class KeepSettings(BudgetSettings):
    """Where state is kept, for how many, and what of pictures.

    cache_dir            folder of the store; None: memory
    max_cached_blocks    most entries in the store; 0: no limit
    partitions           among how many the budgets are divided, those with a quota included: each holds at most its equal part and
                         evicts its own entries alone; 1: one budget for all
    quotas               parts of named partitions: `NAME=BYTES` or `NAME=BYTES:ENTRIES`; of memory and encoder outputs the same share
    ttl_prompts          `ttl` of exact state of prompts; None: `ttl`
    ttl_rows             `ttl` of KV entries that blends computed, never longer than their donors'; None: `ttl`
    ttl_encoder          `ttl` of encoder outputs; None: `ttl`
    ttl_fusion           `ttl` of states of fusion modules; None: `ttl`
    enable_fusion_cache  keep encoder outputs by the pictures' content; None: if there is a `fusion_cache_dir` or `fusion_provider`
    fusion_provider      reader and writer of the model's own fusion modules, `package.module:factory`
    fusion_cache_dir     folder of encoder outputs; None: memory
    encoder_bytes        largest size of encoder outputs in bytes; of a provider's states in memory as much again
    image_root           folder of pictures that samples name
    """

    cache_dir: Folder | None = None
    max_cached_blocks: Count = 0
    partitions: Positive = 1
    quotas: tuple[str, ...] = ()
    ttl_prompts: Seconds | None = None
    ttl_rows: Seconds | None = None
    ttl_encoder: Seconds | None = None
    ttl_fusion: Seconds | None = None
    enable_fusion_cache: bool | None = None
    fusion_provider: str | None = None
    fusion_cache_dir: Folder | None = None
    encoder_bytes: Count = 1024**3
    image_root: Folder | None = None

    @property
    def parts(self) -> Parts:
        """What each partition has of the budgets. Raises: ConfigError where one has no part."""
        return Parts(self.partitions, self.max_bytes, self.max_cached_blocks, named_parts(self.quotas))

    @property
    def fusion_states_dir(self) -> str | None:
        """The folder of a provider's states, beside that of encoder outputs; None if they are not kept."""
        kept = self.fusion_cache_dir if self.fusion_provider else None
        return f"{kept.rstrip('/')}-states" if kept else None

    def lifetime(self, own: float | None) -> float:
        """The limit of a class of entries: its own, or that of all."""
        return self.ttl if own is None else own


@dataclass(frozen=True)
class SemanticCacheConfig(FindSettings, ReuseSettings, KeepSettings, TrustSettings):
    """Settings of a `HierarchicalCache`: those of the four parts.

    >>> config = SemanticCacheConfig(reuse="blend", blend_quality="strict")
    >>> config.blend.share, config.similarity_threshold, config.ttl
    (0.4, 0.85, 0.0)
    """

    def __post_init__(self) -> None:
        check_fields(self)
        if self.enable_fusion_cache is None:
            object.__setattr__(self, "enable_fusion_cache", bool(self.fusion_cache_dir or self.fusion_provider))
        if self.semantic_text is None:
            needed = self.reuse in ("adopt", "top_layer") or (self.reuse == "blend" and not self.copied_text)
            object.__setattr__(self, "semantic_text", needed or self.index_encoder != DEFAULT_ENCODER)
        self._check_reuse()
        _ = self.parts  # raises where a partition has none
        if self.media == "similar" and not any(layer.split(":")[0] == "vision" for layer in self.embedding_layers):
            raise ConfigError(
                "media='similar' lets the vision layer decide, but there is none: add vision:DIM:THRESHOLD to embedding_layers "
                "(--embedding-layer), and give embedding_hook (--embedding-hook) vision or prompt_vision"
            )
        self._check_bound()

    def _check_reuse(self) -> None:
        if self.reuse == "top_layer" and self.prune != "none":
            raise ConfigError(
                f"prune={self.prune} drops rows of the state that reuse=top_layer takes from others: leave one of them out"
            )
        if len(self.costs) not in (0, 4):
            raise ConfigError(
                f"costs={shown(self.costs)} are {len(self.costs)} constants: give four, the seconds of a token, of a pair of tokens, "
                "of a byte loaded and of a token blended, or none to measure them"
            )

    def _check_bound(self) -> None:
        self.groups()
        differs_of(self.differs)
        if self.error_bound is not None and self.prune != "none":
            raise ConfigError(
                f"error_bound={self.error_bound} is a bound on reuse, and prune={self.prune} changes answers without any: leave one out"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SemanticCacheConfig":
        """A config from plain values (JSON, flags). Lists become tuples; an unknown name is an error that lists the known."""
        return from_mapping(cls, values, "the cache's settings", LEFT)
