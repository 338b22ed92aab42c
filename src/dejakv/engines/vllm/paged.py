"""vLLM's paged KV cache as the connector's worker side uses it: gather a prompt's state, put a prompt's state in."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dejakv.engines.vllm.layout import Reader, reader_for, slots_of, write_rows


class PagedKV:
    """All layers' caches. Made before any request runs, since finding the reader writes to the cache.

    Raises: ConfigError if this backend's layout cannot be read back.
    """

    def __init__(self, layers: Mapping[str, Any], caches: Mapping[str, torch.Tensor], block_tokens: int) -> None:
        self.layers = layers
        self.caches = caches
        self.block_tokens = block_tokens
        self.reader: Reader = reader_for(layers, caches, block_tokens)
        self._named = list(caches.items())
        first = next(iter(caches.values()))
        _, self.kv_heads, _, width = first.shape
        self.head_dim = width // 2
        self.dtype, self.device = first.dtype, first.device

    @property
    def bytes_per_token(self) -> int:
        return 2 * len(self.caches) * self.kv_heads * self.head_dim * self.dtype.itemsize

    def shape(self, tokens: int) -> tuple[int, ...]:
        """Of a chunk's tensor: `[2, layers, kv_heads, tokens, head_dim]`."""
        return (2, len(self.caches), self.kv_heads, tokens, self.head_dim)

    def pages_shape(self, tokens: int) -> tuple[int, ...]:
        """Of the blocks that hold so many tokens: `[layers, blocks, kv_heads, block_tokens, 2 * head_dim]`."""
        return (len(self.caches), -(-tokens // self.block_tokens), self.kv_heads, self.block_tokens, 2 * self.head_dim)

    def copy_pages(self, block_ids: Sequence[int], tokens: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The blocks of the first `tokens` tokens as they are, on the cache's device: all that has to be done while they
        cannot change."""
        shape = self.pages_shape(tokens)
        index = torch.tensor(block_ids[: shape[1]], dtype=torch.int64, device=self.device)
        pages = torch.empty(shape, dtype=self.dtype, device=self.device) if out is None else out
        for layer, cache in enumerate(self.caches.values()):
            torch.index_select(cache, 0, index, out=pages[layer])
        return pages

    def unpack(self, pages: torch.Tensor, tokens: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """What `copy_pages` copied, in a chunk's shape. In any thread."""
        state = torch.empty(self.shape(tokens), dtype=self.dtype, device=pages.device) if out is None else out
        whole = tokens // self.block_tokens
        full, rest = whole * self.block_tokens, tokens % self.block_tokens
        for into, read in zip(state, self.reader(pages), strict=True):
            blocks = read.transpose(1, 2)  # [layers, kv_heads, blocks, block_tokens, head_dim]
            into[:, :, :full].unflatten(2, (whole, self.block_tokens)).copy_(blocks[:, :, :whole])
            if rest:
                into[:, :, full:] = blocks[:, :, whole, :rest]
        return state

    def gather(self, block_ids: Sequence[int], tokens: int) -> torch.Tensor:
        """A copy of the first `tokens` tokens' state on the cache's device, in a chunk's shape."""
        return self.unpack(self.copy_pages(block_ids, tokens), tokens)

    def scatter(self, block_ids: Sequence[int], start: int, state: torch.Tensor) -> None:
        """Writes a state `[2, layers, kv_heads, n, head_dim]` to the request's tokens `start..start+n-1`."""
        slots = slots_of(block_ids, self.block_tokens, torch.arange(start, start + state.shape[3])).to(self.device)
        for layer, (name, cache) in enumerate(self.caches.items()):
            write_rows(self.layers[name], cache, state[0, layer], state[1, layer], slots)

    def attention(self, layer: int) -> Any:
        """The attention module of a layer."""
        return self.layers[self._named[layer][0]]

    def keys(self, block_ids: Sequence[int], layer: int, tokens: int) -> torch.Tensor:
        """A layer's rotated K of the first `tokens` tokens, `[kv_heads, tokens, head_dim]`: a copy."""
        index = torch.tensor(block_ids[: -(-tokens // self.block_tokens)], device=self.device)
        keys, _ = self.reader(self._named[layer][1].index_select(0, index))
        return keys.transpose(0, 1).flatten(1, 2)[:, :tokens]


def to_host(pages: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """A copy in pinned memory, made behind the engine's back, and the event to wait for before it is read."""
    host = torch.empty(pages.shape, dtype=pages.dtype, pin_memory=True)
    host.copy_(pages, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event
