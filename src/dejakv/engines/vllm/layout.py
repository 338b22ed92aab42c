"""Reading and writing KV in vLLM's paged cache.

Writing goes through `layer.impl.do_kv_cache_update`, which is right for every backend and works token by token. Reading
has no such function: blocks are copied as they are, and each layout has a reader here that tells K from V in them. `reader_for`
finds the one that returns what was written; where none does, the server is refused at start.

A layer's cache is seen as `[blocks, kv_heads, block_tokens, 2 * head_dim]`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dejakv.errors import ConfigError

Reader = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Views of K and V, `[..., kv_heads, block_tokens, head_dim]`, in contiguous copies of blocks."""


def read_transposed(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's CPU backend: each head's page holds K transposed `[head_dim, tokens]`, then V `[tokens, head_dim]`."""
    *where, tokens, width = pages.shape
    keys, values = pages.view(*where, 2, tokens * width // 2).unbind(-2)
    return keys.unflatten(-1, (width // 2, tokens)).mT, values.unflatten(-1, (tokens, width // 2))


def read_packed(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention, Triton and others: K and V side by side on the last axis."""
    keys, values = pages.chunk(2, dim=-1)
    return keys, values


READERS: tuple[Reader, ...] = (read_transposed, read_packed)


def write_rows(layer: Any, cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes `[kv_heads, tokens, head_dim]` K (rotated) and V to `slots` (block * block_tokens + offset)."""
    keys = keys.transpose(0, 1).to(cache.device).contiguous()
    values = values.transpose(0, 1).to(cache.device).contiguous()
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)


def slots_of(block_ids: Sequence[int], block_tokens: int, start: int, stop: int) -> torch.Tensor:
    """Slots of a request's tokens `start..stop-1`, int64."""
    positions = torch.arange(start, stop)
    return (
        torch.tensor(block_ids, dtype=torch.int64)[positions // block_tokens] * block_tokens + positions % block_tokens
    )


def reader_for(layers: Mapping[str, Any], caches: Mapping[str, torch.Tensor], block_tokens: int) -> Reader:
    """The reader that gives back, bit for bit and in every layer, what `do_kv_cache_update` wrote.

    To be called while nothing is cached: it writes to two blocks and clears them again.
    Raises: ConfigError if no reader passes.
    """
    for reader in READERS:
        if all(_round_trip(reader, layers[name], cache, block_tokens) for name, cache in caches.items()):
            return reader
    kinds = sorted({type(layer.impl).__name__ for layer in layers.values()})
    raise ConfigError(
        f"the KV layout of {', '.join(kinds)} could not be read back: a write-read round trip failed."
        " Choose another attention backend, or run without DejaKVConnector"
    )


def _round_trip(reader: Reader, layer: Any, cache: torch.Tensor, block_tokens: int) -> bool:
    blocks, heads, tokens, width = cache.shape
    if tokens != block_tokens or blocks < 3:
        return False
    picked = [blocks - 1, 1]
    count = 2 * tokens - 3
    generator = torch.Generator().manual_seed(0)
    shape = (heads, count, width // 2)
    keys, values = (torch.randn(shape, generator=generator).to(cache.dtype).to(cache.device) for _ in range(2))
    slots = slots_of(picked, tokens, 0, count).to(cache.device)
    write_rows(layer, cache, keys, values, slots)
    index = torch.tensor(picked, device=cache.device)
    try:
        got = (pages.transpose(0, 1).flatten(1, 2)[:, :count] for pages in reader(cache.index_select(0, index)))
        return all(torch.equal(read, written) for read, written in zip(got, (keys, values), strict=True))
    finally:
        cache[index] = 0
