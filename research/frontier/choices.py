"""Published choices of the tokens to recompute, as functions of the scores (`dejakv.blend.recomputed.Choose`).

All of them choose one set of tokens for all layers. CacheBlend (arXiv 2405.16444) compares K and V behind the first layer with the donors';
SemShareKV (arXiv 2509.24832) compares V; EPIC (LegoLink, arXiv 2410.15332) takes the first tokens of each copied run.
"""

import numpy as np
import torch
from torch import Tensor

from dejakv.blend.recomputed import Choose, highest
from dejakv.blend.token_map import Donors, Ids, TokenMap, equal_runs


def ranked_by(values: Tensor) -> Choose:
    """Choose the highest of these values, `[tokens]`, among the tokens that may be chosen."""
    return lambda scores, forced, count: highest(torch.where(scores < 0, scores, values), forced, count)


def at_random(tokens: int, seed: int) -> Choose:
    """Choose at random: the control."""
    return ranked_by(torch.rand(tokens, generator=torch.Generator().manual_seed(seed)))


def first_of_runs(target: Ids, donors: Donors, found: TokenMap) -> Choose:
    """Choose the tokens nearest behind the start of their copied run (EPIC)."""
    first, _ = equal_runs(target, donors, found.source)
    behind = np.arange(len(target)) - first
    return ranked_by(1.0 / (1.0 + torch.from_numpy(behind).double()))


def by_deviation(fresh: Tensor, donors: Tensor, layer: int, *, keys: bool) -> Choose:
    """Choose the largest relative errors of the donors' V in one layer, or of K and V (CacheBlend).

    fresh, donors  KV entries of full computation and of the donors in target order, `[2, layers, kv_heads, tokens, head_dim]`
    """
    new, old = fresh[:, layer].double(), donors[:, layer].double()
    errors = (new - old).square().sum((1, 3)) / new.square().sum((1, 3)).clamp_min(1e-9)
    return ranked_by(errors[0] + errors[1] if keys else errors[1])
