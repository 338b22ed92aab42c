"""Ways of blending that a frontier compares: DejaKV's qualities, their parts, published ways."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dejakv.blend.recomputed import Choose, highest
from dejakv.blend.settings import MAP, QUALITIES, BlendConfig
from dejakv.blend.token_map import DonorTokens, Ids, TokenMap, equal_runs


@dataclass(frozen=True)
class Cell:
    """One way of blending.

    selector  `prophet` and `similarity` (see BlendConfig), or a published choice (`first`, `value`,
              `kv`, `random`)
    budget    `share`: that share of rows, chosen by the selector alone; `within`: whole changed
              sentences, as many as fit into the share, then the selector; `need`: all changed rows,
              even beyond the share
    quality   `strict`, `default` or `loose`, if it is one of them; then also the cell's name
    offsets, surroundings  see BlendConfig
    """

    map: str
    selector: str
    share: float
    budget: str = "share"
    quality: str = ""
    offsets: bool = False
    surroundings: bool = False

    @property
    def name(self) -> str:
        parts = [name for name in ("offsets", "surroundings") if getattr(self, name)]
        return self.quality or "/".join(
            [self.map, self.selector, self.budget, f"{self.share:g}", *parts]
        )

    @property
    def config(self) -> BlendConfig:
        return BlendConfig(
            map=self.map,  # pyright: ignore[reportArgumentType]
            selector="prophet" if self.selector == "prophet" else "similarity",
            share=self.share,
            by_need=self.budget == "need",
            offsets=self.offsets,
            surroundings=self.surroundings,
            max_share=1.0,
        )


CELLS = (
    *(
        Cell(MAP, quality.selector, quality.share, "need", name, offsets=True, surroundings=True)
        for name, quality in QUALITIES.items()
    ),
    *(
        Cell(MAP, "prophet", share, "need", offsets=True, surroundings=True)
        for share in (0.1, 0.3, 0.5)
    ),
    *(
        Cell(MAP, selector, 0.2, "need", offsets=offsets)
        for selector in ("prophet", "random")
        for offsets in (False, True)
    ),
    *(Cell(MAP, selector, 0.2, "need") for selector in ("first", "value", "kv")),
    *(Cell("embedding", "kv", share) for share in (0.1, 0.2, 0.5)),
    Cell("lsh", "value", 0.2),
    Cell(MAP, "similarity", 0.0, "within"),
    Cell(MAP, "similarity", 0.0, "need"),
    Cell(MAP, "value", 1.0),
)
"""The qualities, other shares of their way, and what each of its parts does alone; at the
default's share the ways of EPIC (`first`) and CacheBlend (`value`, `kv`) on DejaKV's map;
SemShareKV's pair; the question's rows alone, the changed ones alone, all.
"""


def ranked_by(values: Tensor) -> Choose:
    """Choose the highest of these values, `[tokens]`, among the tokens that may be chosen."""
    return lambda scores, forced, count: highest(
        torch.where(scores < 0, scores, values), forced, count
    )


def at_random(tokens: int, seed: int) -> Choose:
    """Choose at random: the control."""
    return ranked_by(torch.rand(tokens, generator=torch.Generator().manual_seed(seed)))


def first_of_runs(target: Ids, donors: DonorTokens, found: TokenMap) -> Choose:
    """Choose the tokens nearest behind the start of their copied run (EPIC)."""
    first, _ = equal_runs(target, donors, found.source)
    behind = np.arange(len(target)) - first
    return ranked_by(1.0 / (1.0 + torch.from_numpy(behind).double()))


def by_deviation(fresh: Tensor, donors: Tensor, layer: int, *, keys: bool) -> Choose:
    """Choose the largest relative errors of the donors' V in one layer, or of K and V (CacheBlend).

    fresh, donors  KV entries of full computation and of the donors in target order, `[2, layers,
                   kv_heads, tokens, head_dim]`
    """
    new, old = fresh[:, layer].double(), donors[:, layer].double()
    errors = (new - old).square().sum((1, 3)) / new.square().sum((1, 3)).clamp_min(1e-9)
    return ranked_by(errors[0] + errors[1] if keys else errors[1])
