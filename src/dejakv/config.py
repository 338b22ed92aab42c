"""Every setting of the cache, checked when it is made."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dejakv.errors import ConfigError
from dejakv.reuse.quality import (
    DEFAULT,
    MAP,
    MAX_GENERATION,
    BlendMap,
    BlendQuality,
    BlendSelector,
    Quality,
    quality_of,
)
from dejakv.settings import Cosine, Count, Folder, Positive, Seconds, Share, check_fields, from_mapping, shown

ReuseMethod = Literal["exact", "adopt", "blend"]
MediaPolicy = Literal["exact", "similar", "ignore"]
LayerMatch = Literal["all", "any", "mean"]
EvictionPolicy = Literal["lru", "lfu"]
PrunePolicy = Literal["none", "attention", "snapkv", "random"]
IndexKind = Literal["flat", "hnsw", "lsh"]

DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
SIMILARITY_THRESHOLD = 0.85
"""Least cosine of a level that is given none."""


@dataclass(frozen=True)
class SemanticCacheConfig:
    """Settings of a `HierarchicalCache`. A threshold of 0 is a threshold: it accepts whatever is not opposed.

    reuse                 `exact`: only equal tokens and media; `adopt`: run a similar donor's prompt instead; `blend`:
                          take a similar donor's KV token by token and recompute the rest
    media                 `exact`: never match across other media; `similar`: the vision layer decides; `ignore`: as the
                          prototypes did (wrong answers on other pictures; reports say so)
    similarity_threshold  least cosine of the semantic text level, [-1, 1]
    chunk_window          characters of the chunk that are embedded; 0 embeds all of it
    index_encoder         sentence-transformers name or folder; `model`: the served model's own input embeddings
    image_encoder         of the layer `vision`: sentence-transformers name or folder of a CLIP model; `model`: the served model's
                          tower; None: CLIP if it can be loaded, else the tower (for a dimension `auto` the tower first)
    embedding_layers      latent layers as `NAME:DIM[:THRESHOLD]`
    embedding_hook        `none`, `prompt`, `vision`, `prompt_vision` or `package.module:factory`
    min_gain              least tokens an approximate plan must save beyond the exact prefix
    free_order            parts of a prompt are rearranged where the request says that their order is free
    costs                 seconds of a row, of a pair of tokens, of a byte loaded, of a token blended (see `dejakv.costs`), for
                          runs that must choose alike; empty: measured, which follows the machine
    lexical_guard         veto on other content words, numbers, polarity or question type
    enable_fusion_cache   keep encoder outputs by the pictures' content; None: if there is a `fusion_cache_dir` or a
                          `fusion_provider`
    fusion_provider       `package.module:factory` of a `levels.fusion.FusionProvider`, which reads the tensors of the model's own
                          fusion modules and writes them back
    levels                further levels as `package.module:factory`, called with the config
    max_bytes             budget of the store in bytes; max_cached_blocks in entries (0: no limit)
    partitions            how many the budgets are divided among: each holds at most its equal part and evicts its own
                          entries alone, so that its figures tell nothing of the others; 1: one budget for all
    memory_bytes          of a store on disk, what is also kept in memory
    encoder_bytes         budget of the encoder registry in bytes
    min_tokens            shorter prompts are not stored
    second_sight          store a prompt only when it comes the second time
    max_write_rate        bytes a second the store may take, 0 for no limit
    blend_quality         `strict`, `default` or `loose`: more rows for answers nearer to full computation's, or fewer for speed
                          (see `dejakv.reuse.quality`)
    copied_text           blend looks for runs of tokens that stand in stored prompts, at whatever place
    blend_share           share of rows that `blend` recomputes in the layers it does not compute whole; more where more
                          has changed. None: the quality's
    blend_selector        what ranks rows (see `dejakv.reuse.selector`). None: the quality's
    blend_map, blend_donors  token map (see `dejakv.reuse.blend.BlendConfig`), and how many prompts a blend takes state from
    prune                 answers are decoded from the tokens that matter most, layer by layer (`reuse.prune.PruneConfig`), unless a
                          request asks for exact reuse; they are approximate
    max_generation        rows that a blend computed may serve later blends: how often approximate state may have gone into
                          them; 0: they are not kept
    """

    reuse: ReuseMethod = "exact"
    media: MediaPolicy = "exact"
    exact_prefix: bool = True
    exact_text: bool = True
    semantic_text: bool = True
    copied_text: bool = True
    similarity_threshold: Cosine = SIMILARITY_THRESHOLD
    chunk_window: Count = 0
    index_encoder: str = DEFAULT_ENCODER
    image_encoder: str | None = None
    index: IndexKind = "flat"
    embedding_layers: tuple[str, ...] = ()
    embedding_hook: str = "none"
    embedding_match: LayerMatch = "all"
    free_order: bool = True
    min_gain: Count = 16
    costs: tuple[Seconds, ...] = ()
    lexical_guard: bool = True
    levels: tuple[str, ...] = ()
    enable_fusion_cache: bool | None = None
    cache_dir: Folder | None = None
    fusion_provider: str | None = None
    fusion_cache_dir: Folder | None = None
    max_bytes: Count = 4 * 1024**3
    max_cached_blocks: Count = 0
    partitions: Positive = 1
    memory_bytes: Count = 512 * 1024**2
    encoder_bytes: Count = 1024**3
    policy: EvictionPolicy = "lru"
    min_tokens: Count = 0
    second_sight: bool = False
    max_write_rate: Count = 0
    blend_quality: BlendQuality = DEFAULT
    blend_map: BlendMap = MAP
    blend_selector: BlendSelector | None = None
    blend_share: Share | None = None
    prune: PrunePolicy = "none"
    blend_donors: Positive = 16
    max_generation: Count = MAX_GENERATION
    image_root: Folder | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.enable_fusion_cache is None:
            object.__setattr__(self, "enable_fusion_cache", bool(self.fusion_cache_dir or self.fusion_provider))
        if len(self.costs) not in (0, 4):
            raise ConfigError(
                f"costs={shown(self.costs)} are {len(self.costs)} constants: give four, the seconds of a row, of a pair of tokens, "
                "of a byte loaded and of a token blended, or none to measure them"
            )
        if 0 < self.max_cached_blocks < self.partitions:
            raise ConfigError(
                f"max_cached_blocks={self.max_cached_blocks} has no part for each of {self.partitions} partitions: give "
                f"{self.partitions} or more, or 0 for no limit"
            )
        if self.media == "similar" and not any(layer.split(":")[0] == "vision" for layer in self.embedding_layers):
            raise ConfigError(
                "media='similar' lets the vision layer decide, but there is none: add --embedding-layer vision:DIM:THRESHOLD"
                " and --embedding-hook vision or prompt_vision"
            )

    @property
    def blend(self) -> Quality:
        """What ranks the rows of a blend and how many are computed."""
        return quality_of(self.blend_quality, self.blend_selector, self.blend_share)

    @property
    def fusion_states_dir(self) -> str | None:
        """The folder of a provider's states, beside that of encoder outputs; None if they are not kept."""
        kept = self.fusion_cache_dir if self.fusion_provider else None
        return f"{kept.rstrip('/')}-states" if kept else None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SemanticCacheConfig":
        """A config from plain values (JSON, flags). Lists become tuples; an unknown name is an error that lists the known."""
        return from_mapping(cls, values, "the cache's settings")
