"""Settings of a blend: token map, ranking of tokens and their share, with every default.

The costs and results of each quality on SmolLM2 are in docs/results/frontier-smollm2.md. Nothing
here imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from dejakv.settings import MAX_SHARE, Count, Positive, Share, strict_dataclass

BlendMap = Literal["context", "embedding", "lsh"]
BlendSelector = Literal["prophet", "similarity"]
BlendQuality = Literal["strict", "default", "loose"]

MAPS: tuple[BlendMap, ...] = get_args(BlendMap)

MAP: BlendMap = "context"
"""Token map of all qualities.

Another map needs many more recomputed tokens for the same answers.
"""

_REVISION = 3
"""Revision, counted up where the same settings recompute other tokens than before.

Evidence of the error bound is of one revision.
"""

MAX_GENERATION = 5
"""How often approximate state may enter KV entries that serve a blend.

The cost of each depth on SmolLM2 is in docs/results/generations.md.
"""


@dataclass(frozen=True)
class BlendQualitySettings:
    """Ranking of tokens, and the share of them to recompute.

    Changed tokens are recomputed in every quality, beyond the share too.
    """

    selector: BlendSelector
    share: float

    @property
    def label(self) -> str:
        """Text that names the quality in evidence of the error bound."""
        return f"rows {_REVISION}, {self.selector}, share {self.share:g}"


_QUALITIES: dict[BlendQuality, BlendQualitySettings] = {
    # About half of the default's divergence where passages moved.
    "strict": BlendQualitySettings("prophet", 0.4),
    # Tokens that the question attends to, or next to an edit, and offsets for the rest: where
    # passages moved, a quarter of the divergence of CacheBlend's or EPIC's choice at this share.
    "default": BlendQualitySettings("prophet", 0.2),
    # Changed tokens and the question, nothing else: fastest, and good only for prompts whose
    # passages stay in place.
    "loose": BlendQualitySettings("similarity", 0.0),
}
QUALITIES: Mapping[BlendQuality, BlendQualitySettings] = MappingProxyType(_QUALITIES)
DEFAULT: BlendQuality = "default"


def quality_of(
    name: BlendQuality, selector: BlendSelector | None = None, share: float | None = None
) -> BlendQualitySettings:
    """Return the named quality, with its selector or share replaced.

    Examples
    --------
    >>> quality_of("default", share=0.3)
    BlendQualitySettings(selector='prophet', share=0.3)
    """
    chosen = QUALITIES[name]
    if selector is not None:
        chosen = replace(chosen, selector=selector)

    return chosen if share is None else replace(chosen, share=share)


@strict_dataclass()
class BlendConfig:
    """Settings of one blend. All layers recompute the same tokens.

    >>> BlendConfig(selector="similarity", share=0.0).by_need
    True
    """

    map: BlendMap = MAP
    """token map: `context` (longest common context), `embedding` (nearest input embedding,
    SemShareKV) or `lsh` (the same by random hyperplanes)"""
    selector: BlendSelector = QUALITIES[DEFAULT].selector
    """ranking of tokens: `prophet` (attention of the question in the last third of the layers) or
    `similarity` (worst match of the token map first)"""
    share: Share = QUALITIES[DEFAULT].share
    """share of the prompt's tokens to recompute"""
    by_need: bool = True
    """recompute changed tokens and the rest of their sentences even beyond the share; otherwise as
    many of these sentences as the share pays for"""
    offsets: bool = True
    """move KV entries that are not recomputed by the differences that recomputed neighbours show
    (`blend.offsets`)"""
    surroundings: bool = True
    """where little changed before a copied run, prefer tokens near the change, and count offsets
    less"""
    tail: Positive | None = None
    """last tokens, always recomputed (the question); None: the last sentence"""
    foreign_context: Count | None = None
    """tokens that a donor's state may have been computed behind and the prompt lacks; None: any
    number"""
    max_share: Share = MAX_SHARE
    """compute a prompt in full if more than this share must be recomputed"""
    max_computed: Share = 1.0
    """or if the blend would recompute more than this share: an exact prefix is cheaper"""

    @property
    def needs_question_pass(self) -> bool:
        """Whether the ranking needs a pass of the question alone, for its attention."""
        return self.selector == "prophet"


def why_too_dear(config: Any, forced: float, computed: float) -> str:
    """Return the reason not to reuse in pieces; empty if it pays.

    Parameters
    ----------
    config : BlendConfig or TopLayerConfig
        Settings with `max_share` and `max_computed`.
    forced : float
        Share of the prompt that is forced.
    computed : float
        Share of the prompt that would be computed.
    """
    if forced > config.max_share:
        return f"too little is alike: {forced:.0%} of the prompt must be computed"
    if computed > config.max_computed:
        return (
            f"the exact prefix is cheaper: {computed:.0%} of the rows would be "
            "computed, and no more than "
            f"{config.max_computed:.0%} pay"
        )
    return ""


def first_asked(layers: int) -> int:
    """Return the first layer whose attention ranks tokens: the last third reads.

    Examples
    --------
    >>> first_asked(30)
    20
    """
    return layers * 2 // 3
