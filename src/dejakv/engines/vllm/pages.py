"""vLLM's paged KV cache as the connector's worker side uses it: copy a prompt's pages, put pages in, take KV entries out of them."""

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dejakv.engines.vllm import upstream
from dejakv.engines.vllm.messages import Tables
from dejakv.errors import ConfigError

_LEAST = 1 << 16


@dataclass(frozen=True)
class LentBuffer:
    """A tensor of the asked shape, contents undefined, and the memory behind it."""

    tensor: torch.Tensor
    memory: torch.Tensor


class BufferPool:
    """Lends host memory for reuse. Thread-safe. A buffer that is not given back is freed by Python.

    keep_bytes  maximum unused bytes; the smallest buffers go first
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep = keep_bytes
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def lend(self, shape: tuple[int, ...], dtype: torch.dtype) -> LentBuffer:
        """Lend a contiguous tensor in host memory: the smallest free buffer that fits, or a new one."""
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            # Free buffers are sorted by size, so the first that fits is the smallest.
            fitting = [index for index, memory in enumerate(self._free) if memory.numel() >= nbytes]
            memory = self._free.pop(fitting[0]) if fitting else None
        with torch.inference_mode(False):  # threads outside that mode write to it too
            if memory is None:  # sizes are powers of two, so that prompts of other lengths find them again
                memory = torch.empty(max(_LEAST, 1 << (nbytes - 1).bit_length()), dtype=torch.uint8)
            return LentBuffer(memory[:nbytes].view(dtype).view(shape), memory)

    def take_back(self, buffer: LentBuffer) -> None:
        """Nothing may read or write the tensor from now on."""
        with self._lock:
            self._free.append(buffer.memory)
            self._free.sort(key=torch.Tensor.numel)
            unused_bytes = sum(memory.numel() for memory in self._free)
            # A large buffer can serve a small request, but not the other way round.
            while unused_bytes > self._keep:
                unused_bytes -= self._free.pop(0).numel()


Reader = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""K and V, `[..., kv_heads, block_tokens, head_dim]`, of contiguous copies of blocks."""


def observed(layer: Any, cache: torch.Tensor, block_tokens: int) -> Reader | None:
    """A reader for any layout that only puts a block's elements in some order; None for others. Writes to a block and clears it again."""
    _, heads, tokens, width = cache.shape
    if tokens != block_tokens:
        return None
    shape = (2, heads, tokens, width // 2)
    # Each element is written with a number of its own: where it lands is the layout.
    numbers = torch.arange(2 * heads * tokens * (width // 2)).view(shape)
    # Block 0 is vLLM's null block.
    slots = slots_of([1], tokens, torch.arange(tokens)).to(cache.device)
    read_numbers = torch.zeros(numbers.numel(), dtype=torch.int64, device=cache.device)
    scale = 1

    try:
        while scale < numbers.numel():  # digit by digit: every dtype of a cache holds 0 to 255 exactly
            keys, values = (numbers // scale % 256).to(cache.dtype)
            write_rows(layer, cache, keys, values, slots)
            read_numbers += cache[1].flatten().to(torch.int64) * scale
            scale *= 256
    finally:
        cache[1] = 0

    ordered, place = read_numbers.sort()
    # A number is missing or there twice, so this is more than another order.
    if not torch.equal(ordered.cpu(), numbers.flatten()):
        return None
    of_keys, of_values = place.view(2, -1)

    def read_observed(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Of two dimensions: with three, index_select takes ten times as long on a CPU.
        flat = pages.reshape(-1, numbers.numel())
        keys, values = (flat.index_select(1, places.to(pages.device)) for places in (of_keys, of_values))
        return keys.view(*pages.shape[:-3], *shape[1:]), values.view(*pages.shape[:-3], *shape[1:])

    return read_observed


def write_rows(layer: Any, cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Write K (rotated) and V, each `[kv_heads, tokens, head_dim]`, to `slots` (`block * block_tokens + offset`)."""
    keys = keys.transpose(0, 1).to(cache.device).contiguous()
    values = values.transpose(0, 1).to(cache.device).contiguous()
    upstream.write_rows(layer, cache, keys, values, slots)


def slots_of(block_ids: Sequence[int], block_tokens: int, places: torch.Tensor) -> torch.Tensor:
    """Slots of a request's tokens at `places`, int64."""
    places = places.cpu()
    return torch.tensor(block_ids, dtype=torch.int64)[places // block_tokens] * block_tokens + places % block_tokens


def tokens_of(layer: Any, cache: torch.Tensor, block_tokens: int, blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """Which token of a block each byte of a layer's page belongs to, int16 `[bytes]`. Writes to a block and clears it again.

    Raises: ConfigError for a byte that belongs to no token, or to several.
    """
    page = bytes_of(cache, blocks)[1]
    token = torch.zeros(page.shape, dtype=torch.int16, device=page.device)
    places = torch.arange(block_tokens)
    if upstream.is_latent(layer):  # a row for each token
        token += (
            places.to(page.device, torch.int16)
            .view(len(page), -1, 1)
            .expand(len(page), -1, page.shape[-1])
            .view(page.shape)
        )
        return token.flatten()

    if cache.dim() != 4 or not hasattr(layer, "impl"):
        raise _unreadable([layer])
    _, heads, _, width = cache.shape
    slots = slots_of([1], block_tokens, places).to(page.device)
    size = cache.dtype.itemsize

    try:
        # Bit by bit of the token's number: a few writes tell the token of every byte.
        for bit in range((block_tokens - 1).bit_length()):
            touched: list[torch.Tensor] = []
            for digit in (1, 0):
                ones = (places >> bit & 1).eq(digit).to(page.device, dtype).view(-1, 1, 1).expand(-1, heads, width // 2)
                upstream.write_rows(layer, cache, ones.contiguous(), ones.contiguous(), slots)
                touched.append(
                    page.unflatten(-1, (-1, size))
                    .ne(0)
                    .any(-1, keepdim=True)
                    .expand(*page.shape[:-1], -1, size)
                    .flatten(-2)
                )
            # A byte of no token is set by neither write, one of several tokens by both.
            if not bool((touched[0] ^ touched[1]).all()):
                raise _unreadable([layer])
            token += touched[0].to(torch.int16) << bit
    finally:
        page.zero_()
    return token.flatten()


def bytes_of(cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """A layer's cache by vLLM's blocks, each of one or more kernel blocks: a view `[blocks, kernel blocks, ..., bytes]`."""
    return cache.view(torch.uint8).unflatten(0, (blocks, -1))


def reader_for(layers: Mapping[str, Any], caches: Mapping[str, torch.Tensor], block_tokens: int) -> Reader:
    """The reader that gives back, bit for bit and in every layer, what `do_kv_cache_update` wrote: by the order seen in the first one.

    To be called while nothing is cached: it writes to two blocks and clears them again.
    Raises: ConfigError where none does.
    """
    name = next(iter(caches))
    reader = observed(layers[name], caches[name], block_tokens)
    # The order was observed in one layer, so it is proven in each.
    if reader is None or not all(_round_trip(reader, layers[name], cache) for name, cache in caches.items()):
        raise _unreadable(layers.values())
    return reader


def _unreadable(layers: Iterable[Any]) -> ConfigError:
    kinds = sorted({upstream.attention_of(layer) for layer in layers})
    return ConfigError(
        f"the KV layout of {', '.join(kinds)} could not be read back: a write-read round trip failed."
        " Choose another attention backend, or run without DejaKVConnector"
    )


def _round_trip(reader: Reader, layer: Any, cache: torch.Tensor) -> bool:
    blocks, heads, tokens, width = cache.shape
    if blocks < 3:
        return False
    # In falling order, so that a reader that ignores block ids fails.
    block_ids = [blocks - 1, 1]
    # The last block is filled in part, as most prompts' last blocks are.
    count = 2 * tokens - 3
    # Its own, since drawing from torch's global generator might change the server's samples.
    generator = torch.Generator().manual_seed(0)
    shape = (heads, count, width // 2)
    keys, values = (torch.randn(shape, generator=generator).to(cache.dtype).to(cache.device) for _ in range(2))
    slots = slots_of(block_ids, tokens, torch.arange(count)).to(cache.device)
    write_rows(layer, cache, keys, values, slots)
    index = torch.tensor(block_ids, device=cache.device)

    try:
        read_back = (pages.transpose(0, 1).flatten(1, 2)[:, :count] for pages in reader(cache.index_select(0, index)))
        return all(torch.equal(read, written) for read, written in zip(read_back, (keys, values), strict=True))
    finally:
        cache[index] = 0


class PagedKV:
    """All layers' caches. Exact state is moved by whole pages, as they are; blends take KV entries out of pages and write them.

    A page of a prompt is what all layers hold for as many tokens, whatever block of its group a layer holds it in.

    layers   attention modules by name
    groups   KV cache group of each layer, by name
    caches   of each layer, `[kernel blocks, ...]`
    blocks   vLLM's blocks, each of one or more kernel blocks
    dtype    of the model: what its attention gives a cache
    entries  whether KV entries can be read and written

    Made before any request runs, since it writes to the caches. Raises: ConfigError if it cannot be found which byte is which token's, or
    entries cannot be read back.
    """

    def __init__(
        self,
        layers: Mapping[str, Any],
        caches: Mapping[str, torch.Tensor],
        block_tokens: int,
        blocks: int,
        dtype: torch.dtype,
        groups: Mapping[str, int] | None = None,
        *,
        entries: bool = False,
    ) -> None:
        self.layers = layers
        self._groups = [(groups or {}).get(name, 0) for name in caches]
        self.caches = caches
        self.block_tokens = block_tokens
        self._named = list(caches.items())
        self._pages = [bytes_of(cache, blocks) for cache in caches.values()]
        self._sizes = [pages[0].numel() for pages in self._pages]
        self.page_bytes = sum(self._sizes)

        first_cache = self._named[0][1]
        self.dtype, self.device = first_cache.dtype, first_cache.device
        layer_tokens = (tokens_of(layers[name], cache, block_tokens, blocks, dtype) for name, cache in self._named)
        self._token = torch.cat(list(layer_tokens)).to(self.device)

        if entries:
            self.reader: Reader = reader_for(layers, caches, block_tokens)
            _, self.kv_heads, _, width = first_cache.shape
            self.head_dim = width // 2

    @property
    def bytes_per_token(self) -> int:
        return self.page_bytes // self.block_tokens

    # Whole pages

    def pages_shape(self, tokens: int) -> tuple[int, int]:
        """Of the pages that hold so many tokens: `[pages, bytes]`, those of all layers side by side."""
        return -(-tokens // self.block_tokens), self.page_bytes

    def lacks(self, tables: Tables, start: int, stop: int) -> bool:
        """Whether a group holds nothing of some tokens from `start` to `stop - 1`: they lie outside of its window."""
        return any(0 in ids[start // self.block_tokens : -(-stop // self.block_tokens)] for ids in tables)

    def copy_pages(self, tables: Tables, tokens: int, first: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy the pages of `tokens` tokens from page `first` on, uint8, on the cache's device. Bytes of later tokens, perhaps another
        request's, are 0."""
        count, size = self.pages_shape(tokens)
        pages = torch.empty((count, size), dtype=torch.uint8, device=self.device) if out is None else out
        indexes = [torch.tensor(ids[first : first + count], dtype=torch.int64, device=self.device) for ids in tables]
        for cache, group, page in zip(self._pages, self._groups, pages.split(self._sizes, dim=1), strict=True):
            torch.index_select(cache, 0, indexes[group], out=page.unflatten(1, cache.shape[1:]))

        rest = tokens % self.block_tokens
        if rest:
            pages[-1].masked_fill_(self._token >= rest, 0)
        return pages

    def put_pages(self, tables: Tables, pages: torch.Tensor, first: int = 0) -> None:
        """Writes pages `[pages, bytes]` to the blocks from the first one on, of each group to those inside of its window."""
        indexes = [torch.tensor(ids[first : first + len(pages)], device=self.device) for ids in tables]
        parts = pages.to(self.device).split(self._sizes, dim=1)
        for cache, group, page in zip(self._pages, self._groups, parts, strict=True):
            index, page = indexes[group], page.unflatten(1, cache.shape[1:])
            # 0 stands for a block outside of the group's window.
            inside = index.ne(0)
            cache.index_copy_(0, index[inside], page if inside.all() else page[inside])

    # KV entries

    def shape(self, tokens: int) -> tuple[int, ...]:
        """Of entries: `[2, layers, kv_heads, tokens, head_dim]`."""
        return (2, len(self.caches), self.kv_heads, tokens, self.head_dim)

    def entries(self, pages: torch.Tensor, tokens: int) -> torch.Tensor:
        """The KV entries of the first `tokens` tokens in pages. In any thread."""
        state = torch.empty(self.shape(tokens), dtype=self.dtype, device=pages.device)
        shape = (len(pages), len(self.caches), self.kv_heads, self.block_tokens, 2 * self.head_dim)
        whole = tokens // self.block_tokens
        full, rest = whole * self.block_tokens, tokens % self.block_tokens

        for into, read in zip(state, self.reader(pages.view(self.dtype).view(shape)), strict=True):
            blocks = read.movedim(0, 2)  # [layers, kv_heads, blocks, block_tokens, head_dim]
            into[:, :, :full].unflatten(2, (whole, self.block_tokens)).copy_(blocks[:, :, :whole])
            if rest:
                into[:, :, full:] = blocks[:, :, whole, :rest]
        return state

    def gather(self, block_ids: Sequence[int], tokens: int) -> torch.Tensor:
        """A copy of the first `tokens` tokens' entries on the cache's device."""
        return self.entries(self.copy_pages((tuple(block_ids),), tokens), tokens)

    def scatter(self, block_ids: Sequence[int], start: int, state: torch.Tensor) -> None:
        """Writes entries `[2, layers, kv_heads, n, head_dim]` to the request's tokens `start..start+n-1`."""
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
