"""Layouts of KV caches in which two ways to do the fused copy of donors' state are compared."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from dejakv.blend.offsets import OffsetCorrection, corrected, corrections
from dejakv.engines.vllm.blend.rotary import LayerRotaryTables
from dejakv.engines.vllm.blend.row_memory import (
    RowMemory,
    cache_memory,
    dense_memory,
    pages_memory,
)
from dejakv.engines.vllm.pages import PagedKV, slots_of, write_rows

BLOCK, BLOCKS, LAYERS, POSITIONS = 16, 8, 3, 400

Copy = Callable[[PagedKV, LayerRotaryTables, RowMemory, RowMemory, Any], object]
"""Copies rows between two places, by slots."""


Correct = Callable[..., object]
"""Writes corrected rows to a cache's second layer; called as `correct_by_torch`."""


class Case(NamedTuple):
    """A layout of the KV cache, a model's heads and its rotary tables."""

    order: str
    heads: int
    width: int
    turned: int
    neox_style: bool
    tables: int
    dtype: torch.dtype


CASES = [
    Case("tokens first", 2, 64, 64, True, 1, torch.bfloat16),
    Case("tokens first", 3, 40, 24, True, 2, torch.bfloat16),
    Case("heads first", 2, 32, 32, False, 2, torch.float16),
    Case("packed", 1, 32, 16, False, 1, torch.float32),
    Case("packed", 3, 48, 48, True, 1, torch.bfloat16),
]


class CacheLayer:
    """An attention layer that writes K and V into `[blocks, heads, tokens, 2 * width]`.

    `packed`: pairs of numbers lie side by side for all tokens of a block.
    """

    attn_backend = SimpleNamespace(forward_includes_kv_cache_update=False)

    def __init__(self, *, packed: bool = False) -> None:
        self.impl, self._packed = self, packed

    def do_kv_cache_update(
        self, _layer: Any, keys: Any, values: Any, cache: Any, slots: Any
    ) -> None:
        """Write rows, as vLLM's kernels do."""
        block_tokens = cache.shape[2]
        rows = torch.cat([keys, values], dim=-1)
        block, offset = slots // block_tokens, slots % block_tokens
        if self._packed:
            pairs = cache.view(len(cache), cache.shape[1], -1, block_tokens, 2)
            pairs[block, :, :, offset] = rows.unflatten(-1, (-1, 2))
        else:
            cache[block, :, offset] = rows


def paged_kv(
    case: Case, device: torch.device, layers: int = LAYERS, blocks: int = BLOCKS
) -> PagedKV:
    """Make an empty KV cache."""
    shape = (blocks, case.heads, BLOCK, 2 * case.width)

    def cache() -> torch.Tensor:
        if case.order == "tokens first":
            by_token = (blocks, BLOCK, case.heads, 2 * case.width)
            return torch.zeros(by_token, dtype=case.dtype, device=device).transpose(1, 2)
        return torch.zeros(shape, dtype=case.dtype, device=device)

    attention = {f"layer {n}": CacheLayer(packed=case.order == "packed") for n in range(layers)}
    caches = {name: cache() for name in attention}
    return PagedKV(attention, caches, BLOCK, blocks, case.dtype, entries=True)


def rotary_tables(
    case: Case, device: torch.device, layers: int = LAYERS, positions: int = POSITIONS
) -> LayerRotaryTables:
    """Make the layers' rotary tables, scaled as yarn scales them."""
    steps = 10000.0 ** (-torch.arange(0, case.turned, 2) / case.turned)
    tables: list[torch.Tensor] = []
    for kind in range(case.tables):
        angles = torch.outer(torch.arange(float(positions)), steps) * (1 + kind)
        tables.append((1.1 * torch.cat([angles.cos(), angles.sin()], -1)).to(device))
    kinds = (tables[layer % case.tables] for layer in range(layers))
    return LayerRotaryTables([(table, case.neox_style) for table in kinds])


def copied(
    copy: Copy, case: Case, device: torch.device = torch.device("cpu"), count: int = 12
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy `count` rows three ways, and return all K and all V that came of it.

    They are taken out of raw pages into the cache, and into rows, most of them moved; then from
    there into a cache.
    """
    paged, again = paged_kv(case, device), paged_kv(case, device)
    rotary = rotary_tables(case, device)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(4, paged.page_bytes // case.dtype.itemsize, generator=generator)
    pages = numbers.to(case.dtype).view(torch.uint8).to(device)

    rng = np.random.default_rng(0)
    source, after = rng.permutation(4 * BLOCK)[:count], rng.integers(0, POSITIONS, count)
    slots = rng.permutation(BLOCK * (BLOCKS - 1))[:count] + BLOCK
    # The first rows stay where they are.
    before = np.where(np.arange(count) < 3, after, rng.integers(0, POSITIONS, count))
    rows, order = torch.zeros(paged.shape(count), dtype=case.dtype, device=device), np.arange(count)

    raw = pages_memory(paged, pages)
    copy(paged, rotary, raw, cache_memory(paged), np.stack([source, slots, before, after]))
    copy(paged, rotary, raw, dense_memory(rows), np.stack([source, order[::-1], before, after]))
    copy(
        again,
        rotary,
        dense_memory(rows),
        cache_memory(again),
        np.stack([order, slots, after, after]),
    )

    halves: list[torch.Tensor] = []
    for half in range(2):
        caches = [*paged.caches.values(), *again.caches.values()]
        parts = [paged.reader(cache.contiguous())[half].flatten() for cache in caches]
        halves.append(torch.cat([*parts, rows[half].flatten()]))
    return halves[0], halves[1]


def corrected_rows(
    correct: Correct, case: Case, device: torch.device = torch.device("cpu")
) -> tuple[torch.Tensor, torch.Tensor]:
    """Correct rows of a cache's second layer, of two pieces; return all its K and all its V."""
    paged, count = paged_kv(case, device), BLOCK * (BLOCKS - 2)
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(paged.shape(count), generator=generator).to(case.dtype).to(device)
    order = torch.randperm(count, generator=generator)
    rows, pieces = order[:40].sort().values, np.arange(count) * 2 // count
    moves = corrections(pieces, rows)
    slots = slots_of(list(range(BLOCKS - 1, 1, -1)), BLOCK, torch.cat([m.rest for m in moves]))
    tokens = torch.randperm(50, generator=generator)[: len(rows)]
    # As a forward has them: K and V are parts of one product.
    product = torch.randn(50, case.heads, 2 * case.width, generator=generator)
    key, value = product.to(case.dtype).to(device).split(case.width, dim=-1)
    correct(paged, state, key, value, tokens.to(device), moves, slots)
    read = paged.reader(list(paged.caches.values())[1].contiguous())
    return read[0].flatten(), read[1].flatten()


def correct_by_torch(
    paged: PagedKV,
    state: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    moves: Sequence[OffsetCorrection],
    slots: torch.Tensor,
) -> None:
    """Correct rows of the second layer by operations of torch."""
    fresh = torch.stack((key[rows].transpose(0, 1), value[rows].transpose(0, 1)))
    for move, at in zip(moves, slots.split([len(move.rest) for move in moves]), strict=True):
        parts = (move.rest, move.anchors, move.anchor_places, move.weights)
        there = OffsetCorrection(*(part.to(key.device) for part in parts))
        keys, values = corrected(state[:, 1], fresh, there)
        name = list(paged.caches)[1]
        write_rows(paged.layers[name], paged.caches[name], keys, values, at.to(key.device))


def difference(
    results: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> str:
    """Return how a kernel's K or V differ from those of torch; empty if by rounding of K alone."""
    (keys, values), (expected_keys, expected_values) = results, expected
    if not torch.equal(values, expected_values):
        return "V differ"
    # The last bit: Triton's interpreter cuts off what 16 bits cannot hold, where a GPU rounds.
    # Of float32, a GPU that multiplies and adds at once rounds one product less.
    eps, size = torch.finfo(keys.dtype).eps, expected_keys.float().abs()
    limit = 16 * eps * (1 + size) if keys.dtype == torch.float32 else eps * size + 4e-7
    distance = (keys.float() - expected_keys.float()).abs()
    if bool((distance <= limit).all()) and bool((expected_keys != 0).any()):
        return ""
    return f"K differ by up to {float(distance.max()):.2g}"


def relative_error(values: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the greatest distance, in units of the greatest value."""
    distance = (values.float() - expected.float()).abs().max()
    return float(distance / expected.float().abs().max().clamp_min(1e-6))
