"""How good a blend is to be, by name: the three settings that `--blend-quality` chooses from.

Every default of what ranks rows and how many are computed is taken from here. What the names cost and give on SmolLM2 is in
docs/results/frontier-smollm2.md; `dejakv frontier --model smollm2-135m --only strict --only default --only loose` measures them again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

BlendMap = Literal["context", "embedding", "lsh", "align"]
BlendSelector = Literal["value", "kv", "similarity", "query", "prophet", "random"]
BlendQuality = Literal["strict", "default", "loose"]

MAP: BlendMap = "context"
"""The token map of all three. With another one no share that saves much mends the answers."""

_REVISION = 2
"""Counted up where the same settings compute other rows than before: evidence of the error bound is of one revision."""

MAX_GENERATION = 5
"""Generations of rows that serve blends. What each costs on SmolLM2 is in docs/results/generations.md; `python -m
benchmarks.generations` measures it again."""


TOP_LAYER_TAIL = 32
"""Last rows of a prompt that `top_layer` computes in any case: where the question stands."""


@dataclass(frozen=True)
class Quality:
    """What ranks rows, and the share of them that is computed. Rows that changed are computed in every quality, beyond the
    share too."""

    selector: BlendSelector
    share: float

    @property
    def told(self) -> str:
        return f"rows {_REVISION}, {self.selector}, share {self.share:g}"


_QUALITIES: dict[BlendQuality, Quality] = {
    # Two fifths of the rows: about half of the default's divergence where passages moved.
    "strict": Quality("prophet", 0.4),
    # What the question attends to where the model reads, or what is next to an edit, and offsets for the rest: where passages
    # moved, a quarter of the divergence that comparing V or the first rows of each passage leave at this share.
    "default": Quality("prophet", 0.2),
    # What changed and the question, nothing else: fastest, and good for prompts whose passages stay in place alone.
    "loose": Quality("similarity", 0.0),
}
QUALITIES: Mapping[BlendQuality, Quality] = MappingProxyType(_QUALITIES)
DEFAULT: BlendQuality = "default"


def quality_of(name: BlendQuality, selector: BlendSelector | None = None, share: float | None = None) -> Quality:
    """The named quality, with what was given beside it in place of its own."""
    chosen = QUALITIES[name]
    if selector is not None:
        chosen = replace(chosen, selector=selector)
    return chosen if share is None else replace(chosen, share=share)
