"""Settings of a blend, for the cache and for vLLM's connector."""

from dataclasses import dataclass

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
from dejakv.settings import Count, Positive, Share


@dataclass(frozen=True)
class BlendSettings:
    """What a blend takes from its donors and what it computes.

    min_gain        least tokens that reuse must save: an approximate plan beyond the exact prefix (`adopt`: of the whole prompt), in
                    vLLM a load beyond vLLM's own prefix hit
    blend_quality   `strict`, `default` or `loose`: more rows for answers nearer to full computation's, or fewer for speed
                    (see `dejakv.reuse.quality`)
    blend_share     share of rows that is recomputed in the layers that are not computed whole; more where more has changed.
                    None: the quality's
    blend_selector  what ranks rows (see `dejakv.reuse.selector`). None: the quality's
    blend_map       token map (see `dejakv.reuse.blend.BlendConfig`)
    blend_donors    of how many prompts a blend takes state at most
    max_generation  rows that a blend computed may serve later blends: how often approximate state may have gone into them;
                    0: they are not kept
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
        """What ranks the rows of a blend and how many are computed."""
        return quality_of(self.blend_quality, self.blend_selector, self.blend_share)
