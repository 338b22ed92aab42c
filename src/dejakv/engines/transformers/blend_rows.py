"""The rows that a blend computed in every layer: what later blends may take from it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dejakv.engines.base import ComputedRows
from dejakv.engines.tensors import to_store
from dejakv.engines.transformers.blend_cache import BlendCache
from dejakv.find.copied.fingerprints import GUARANTEED
from dejakv.reuse.new_text import new_runs
from dejakv.reuse.token_map import Donors, Ids, TokenMap
from dejakv.store.base import ChunkMeta, Tensor


@dataclass(frozen=True)
class MadeOf:
    """What a blend was planned from. `metas`: of the donors, in the order of `donors`."""

    target: Ids
    donors: Donors
    found: TokenMap
    metas: Sequence[ChunkMeta]


def computed_rows(cache: BlendCache, made_of: MadeOf) -> ComputedRows | None:
    """The new text among the rows of a blend that has run; None if there is too little of it to be found again."""
    last = cache.trace.rows[-1]  # no layer computes a row that the one before it left out
    computed = np.full(cache.tokens, last is None)
    if last is not None:
        computed[last.cpu().numpy()] = True
    runs = new_runs(made_of.target, made_of.donors, made_of.found, computed, GUARANTEED)
    if not runs:
        return None
    used = np.unique(made_of.donors.number[made_of.found.source]).tolist()
    metas = [made_of.metas[number] for number in used]
    generation = 1 + max(meta.generation for meta in metas)
    return ComputedRows(
        runs, tuple(meta.id for meta in metas), generation, lambda first, stop: _captured(cache, first, stop)
    )


def _captured(cache: BlendCache, first: int, stop: int) -> Tensor:
    """K and V of the rows, `[2, layers, kv_heads, rows, head_dim]` on the CPU; a copy."""
    parts = [getattr(layer, kind)[0, :, first:stop] for kind in ("keys", "values") for layer in cache.blends]
    return to_store(torch.stack(parts).unflatten(0, (2, len(cache.blends))).detach().cpu())
