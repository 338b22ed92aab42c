"""How good a blend is to be, by name: the three settings that `--blend-quality` chooses from.

Every default of what ranks rows and how many are computed is taken from here. What the names cost and give on SmolLM2 is in
docs/results/frontier-smollm2.md; `dejakv frontier --model smollm2-135m --only strict --only default --only loose` measures it again.
"""

from dataclasses import dataclass, replace
from typing import Literal

BlendMap = Literal["context", "embedding", "lsh", "align"]
BlendSelector = Literal["value", "kv", "similarity", "query", "random"]
BlendQuality = Literal["strict", "default", "loose"]

MAP: BlendMap = "context"
"""The token map of all three: with another one no share of rows that is worth it mends the answers."""


@dataclass(frozen=True)
class Quality:
    """What ranks rows, and the share of them that is computed. Rows that changed are computed in every quality, beyond the
    share too."""

    selector: BlendSelector
    share: float


QUALITIES: dict[BlendQuality, Quality] = {
    "strict": Quality("value", 0.3),
    "default": Quality("value", 0.15),
    "loose": Quality("similarity", 0.0),
}
DEFAULT: BlendQuality = "default"


def quality_of(name: BlendQuality, selector: BlendSelector | None = None, share: float | None = None) -> Quality:
    """The named quality, with what was given beside it in place of its own."""
    chosen = QUALITIES[name]
    if selector is not None:
        chosen = replace(chosen, selector=selector)
    return chosen if share is None else replace(chosen, share=share)
