"""Reading and writing KV in vLLM's paged cache.

Writing goes through `layer.impl.do_kv_cache_update`, which is right for every backend and works token by token. Reading
has no such function: blocks are copied as they are, and each layout has a reader here that tells K from V in them. A layout
that is not known here is observed: every element is written with its number, which shows where it went. `reader_for` finds the
reader that returns what was written; where none does, the server is refused at start.

A layer's cache is seen as `[blocks, kv_heads, block_tokens, 2 * head_dim]`.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
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


def observed(layer: Any, cache: torch.Tensor, block_tokens: int) -> Reader | None:
    """A reader for any layout that only puts a block's elements in another order (vLLM's bf16 on a CPU with AMX); None for
    others. Writes to a block and clears it again."""
    _, heads, tokens, width = cache.shape
    if tokens != block_tokens:
        return None
    shape = (2, heads, tokens, width // 2)
    numbers = torch.arange(2 * heads * tokens * (width // 2)).view(shape)
    slots = slots_of([1], tokens, torch.arange(tokens)).to(cache.device)
    found = torch.zeros(numbers.numel(), dtype=torch.int64, device=cache.device)
    scale = 1
    try:
        while scale < numbers.numel():  # digit by digit: every dtype of a cache holds 0 to 255 exactly
            keys, values = (numbers // scale % 256).to(cache.dtype)
            write_rows(layer, cache, keys, values, slots)
            found += cache[1].flatten().to(torch.int64) * scale
            scale *= 256
    finally:
        cache[1] = 0
    ordered, place = found.sort()
    if not torch.equal(ordered.cpu(), numbers.flatten()):
        return None
    of_keys, of_values = place.view(2, -1)

    def read_observed(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = pages.flatten(-3)
        keys, values = (flat[..., there.to(pages.device)] for there in (of_keys, of_values))
        return keys.unflatten(-1, shape[1:]), values.unflatten(-1, shape[1:])

    return read_observed


def write_rows(layer: Any, cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes `[kv_heads, tokens, head_dim]` K (rotated) and V to `slots` (block * block_tokens + offset)."""
    keys = keys.transpose(0, 1).to(cache.device).contiguous()
    values = values.transpose(0, 1).to(cache.device).contiguous()
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)


def slots_of(block_ids: Sequence[int], block_tokens: int, places: torch.Tensor) -> torch.Tensor:
    """Slots of a request's tokens at `places`, int64."""
    places = places.cpu()
    return torch.tensor(block_ids, dtype=torch.int64)[places // block_tokens] * block_tokens + places % block_tokens


def reader_for(layers: Mapping[str, Any], caches: Mapping[str, torch.Tensor], block_tokens: int) -> Reader:
    """The reader that gives back, bit for bit and in every layer, what `do_kv_cache_update` wrote.

    To be called while nothing is cached: it writes to two blocks and clears them again.
    Raises: ConfigError if no reader passes.
    """
    for reader in _candidates(layers, caches, block_tokens):
        if all(_round_trip(reader, layers[name], cache, block_tokens) for name, cache in caches.items()):
            return reader
    kinds = sorted({type(layer.impl).__name__ for layer in layers.values()})
    raise ConfigError(
        f"the KV layout of {', '.join(kinds)} could not be read back: a write-read round trip failed."
        " Choose another attention backend, or run without DejaKVConnector"
    )


def _candidates(layers: Mapping[str, Any], caches: Mapping[str, torch.Tensor], block_tokens: int) -> Generator[Reader]:
    yield from READERS
    name = next(iter(caches))
    reader = observed(layers[name], caches[name], block_tokens)
    if reader is not None:
        yield reader


def _round_trip(reader: Reader, layer: Any, cache: torch.Tensor, block_tokens: int) -> bool:
    blocks, heads, tokens, width = cache.shape
    if tokens != block_tokens or blocks < 3:
        return False
    picked = [blocks - 1, 1]
    count = 2 * tokens - 3
    generator = torch.Generator().manual_seed(0)
    shape = (heads, count, width // 2)
    keys, values = (torch.randn(shape, generator=generator).to(cache.dtype).to(cache.device) for _ in range(2))
    slots = slots_of(picked, tokens, torch.arange(count)).to(cache.device)
    write_rows(layer, cache, keys, values, slots)
    index = torch.tensor(picked, device=cache.device)
    try:
        got = (pages.transpose(0, 1).flatten(1, 2)[:, :count] for pages in reader(cache.index_select(0, index)))
        return all(torch.equal(read, written) for read, written in zip(got, (keys, values), strict=True))
    finally:
        cache[index] = 0
