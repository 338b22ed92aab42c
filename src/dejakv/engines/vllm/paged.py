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

    def gather(self, block_ids: Sequence[int], tokens: int) -> torch.Tensor:
        """A copy of the first `tokens` tokens' state on the cache's device, in a chunk's shape."""
        used = -(-tokens // self.block_tokens)
        index = torch.tensor(block_ids[:used], dtype=torch.int64, device=self.device)
        out = torch.empty(self.shape(tokens), dtype=self.dtype, device=self.device)
        for layer, cache in enumerate(self.caches.values()):
            keys, values = self.reader(cache, index)
            out[0, layer], out[1, layer] = keys[:, :tokens], values[:, :tokens]
        return out

    def scatter(self, block_ids: Sequence[int], start: int, state: torch.Tensor) -> None:
        """Writes a state `[2, layers, kv_heads, n, head_dim]` to the request's tokens `start..start+n-1`."""
        slots = slots_of(block_ids, self.block_tokens, start, start + state.shape[3]).to(self.device)
        for layer, (name, cache) in enumerate(self.caches.items()):
            write_rows(self.layers[name], cache, state[0, layer], state[1, layer], slots)


def to_host(state: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The state in host memory, and an event to wait for before it is read (None: it is there).

    On a GPU the copy runs behind the engine's back, into pinned memory.
    """
    if state.device.type != "cuda":
        return state.cpu(), None
    host = torch.empty(state.shape, dtype=state.dtype, pin_memory=True)
    host.copy_(state, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event
