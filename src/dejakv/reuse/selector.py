"""Which rows are worth computing: each selector scores rows, the highest scores are computed.

| name         | looks at                                                    | source                        |
| `value`      | how far the donor's V is from this prompt's, before a layer | SemShareKV, V alone           |
| `kv`         | the same of K and V                                         | CacheBlend, arXiv 2405.16444  |
| `similarity` | how badly the token map matched                             | -                             |
| `query`      | how much the prompt's last tokens attend to the row         | SnapKV, arXiv 2404.14469      |
| `prophet`    | the same in the last third of the layers, which read        | ProphetKV                     |
| `random`     | nothing: the control                                        | -                             |
"""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from dejakv.errors import ConfigError
from dejakv.reuse.quality import BlendSelector

SELECTORS: tuple[BlendSelector, ...] = get_args(BlendSelector)


@dataclass(frozen=True)
class Selector:
    """`deviation`: it compares fresh K or V with the donor's, so it needs the rows' input to a layer (and, to be worth
    anything, at least one layer computed completely before)."""

    name: str
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in SELECTORS:
            raise ConfigError(f"selector {self.name!r} is unknown: choose one of {', '.join(SELECTORS)}")

    @property
    def deviation(self) -> bool:
        return self.name in ("value", "kv")

    @property
    def asks(self) -> bool:
        """It needs the question's attention, from the layer `first_asked` on."""
        return self.name in ("query", "prophet")

    def first_asked(self, layers: int) -> int:
        """The first layer whose attention counts."""
        return layers * 2 // 3 if self.name == "prophet" else 0

    def fixed_scores(self, similarity: Tensor) -> Tensor:
        """Scores that need no model: `[tokens]`, from the token map (or, for `random`, from the seed)."""
        if self.name == "random":
            generator = torch.Generator().manual_seed(self.seed)
            return torch.rand(similarity.shape, generator=generator).to(similarity.device)
        return 1.0 - similarity


def relative_error(new: Tensor, old: Tensor) -> Tensor:
    """Squared distance over squared length, heads pooled: `[batch, heads, rows, d]` twice -> `[rows]` float32.

    Of a batch (beams: copies of one prompt) the first counts.
    """
    new, old = new[:1].float(), old[:1].float()
    return ((new - old).square().sum((0, 1, 3)) / new.square().sum((0, 1, 3)).clamp_min(1e-9)).float()


def choose(scores: Tensor, forced: Tensor, count: int) -> Tensor:
    """Indices, ascending, of all forced rows and the highest scores up to `count` rows, of equal ones the first. `scores` and
    `forced`: `[rows]`."""
    wanted = max(count, int(forced.sum()))
    if wanted >= scores.numel():
        return torch.arange(scores.numel(), device=scores.device)
    ranked = scores.float().masked_fill(forced, float("inf"))
    return ranked.sort(descending=True, stable=True).indices[:wanted].sort().values
