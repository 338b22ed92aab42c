"""vLLM's paged KV cache as the worker side uses it.

Exact state is copied by whole pages. Blends take KV entries out of pages and write entries.
"""

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dejakv.engines.vllm import upstream
from dejakv.engines.vllm.device import DeviceCopies
from dejakv.engines.vllm.messages import Tables
from dejakv.engines.vllm.recurrent.states import StatePages
from dejakv.errors import ConfigError

_MIN_BYTES = 1 << 16


@dataclass(frozen=True)
class LentBuffer:
    """A lent tensor of undefined content, and the memory behind it."""

    tensor: torch.Tensor
    memory: torch.Tensor


class BufferPool:
    """Lends host memory for reuse. Thread-safe.

    A buffer that is not given back is freed by Python.

    Parameters
    ----------
    keep_bytes : int
        Maximum unused bytes. The smallest buffers go first.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep = keep_bytes
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def lend(self, shape: tuple[int, ...], dtype: torch.dtype) -> LentBuffer:
        """Lend a contiguous tensor in host memory, in the smallest free buffer that fits."""
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            # Free buffers are sorted by size, so the first that fits is the smallest.
            fitting = [index for index, memory in enumerate(self._free) if memory.numel() >= nbytes]
            memory = self._free.pop(fitting[0]) if fitting else None
        # Outside of inference mode, since threads outside of that mode write to the tensor too.
        with torch.inference_mode(False):
            # Sizes are powers of two, so that prompts of other lengths find them again.
            if memory is None:
                memory = torch.empty(
                    max(_MIN_BYTES, 1 << (nbytes - 1).bit_length()), dtype=torch.uint8
                )
            return LentBuffer(memory[:nbytes].view(dtype).view(shape), memory)

    def take_back(self, buffer: LentBuffer) -> None:
        """Take a buffer back; nothing may read or write its tensor from now on."""
        with self._lock:
            self._free.append(buffer.memory)
            self._free.sort(key=torch.Tensor.numel)
            unused_bytes = sum(memory.numel() for memory in self._free)
            # A large buffer can serve a small request, but not the other way round.
            while unused_bytes > self._keep:
                unused_bytes -= self._free.pop(0).numel()


Reader = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Splits contiguous copies of blocks into K and V, each `[..., kv_heads, t1, t2, d1, d2]`.

`t1 * t2` are the tokens of a block and `d1 * d2` the numbers of a head, each in its order. The
results are views where an order of the elements allows it (`_strides_of`), else copies.
"""


def observed_reader(layer: Any, cache: torch.Tensor, block_tokens: int) -> Reader | None:
    """Find out a cache's layout by writing numbers to a block, and return a reader for it.

    Any layout is readable that only puts a block's elements in some order. The block is cleared
    again.

    Parameters
    ----------
    layer : Attention
        Attention layer that writes to the cache.
    cache : Tensor, shape [blocks, kv_heads, block_tokens, 2 * head_dim]
        Cache of the layer.
    block_tokens : int
        Tokens of a block of vLLM's.

    Returns
    -------
    Reader or None
        None for any other layout.
    """
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
        # Digit by digit: every dtype of a cache holds 0 to 255 exactly.
        while scale < numbers.numel():
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

    halves = place.view(shape).cpu()
    strides = [_strides_of(half) for half in halves]
    views = [each for each in strides if each is not None]
    if len(views) == 2:

        def read_views(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            flat = pages.reshape(*pages.shape[:-3], -1)
            outer, start = flat.shape[:-1], flat.storage_offset()
            keys, values = (
                flat.as_strided(
                    (*outer, *each.sizes), (*flat.stride()[:-1], *each.steps), start + each.first
                )
                for each in views
            )
            return keys, values

        return read_views

    of_keys, of_values = place.view(2, -1)

    def read_any_order(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Of two dimensions: with three, index_select takes ten times as long on a CPU.
        flat = pages.reshape(-1, numbers.numel())
        keys, values = (
            flat.index_select(1, places.to(pages.device)).view(
                *pages.shape[:-3], heads, 1, tokens, 1, width // 2
            )
            for places in (of_keys, of_values)
        )
        return keys, values

    return read_any_order


@dataclass(frozen=True)
class _Strides:
    """Places of K, or of V, in a block: `first` plus the index on each axis times its step.

    The axes are `[kv_heads, t1, t2, d1, d2]` (see `Reader`).
    """

    first: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]


def _strides_of(places: torch.Tensor) -> _Strides | None:
    """Return the strides of places `[kv_heads, block_tokens, head_dim]`, or None without any.

    Tokens, and the numbers of a head, may each be packed in groups, as kernels for CPUs do.
    """
    heads, tokens, numbers = places.shape
    first = int(places[0, 0, 0])
    head_step = int(places[1, 0, 0]) - first if heads > 1 else 0
    t_sizes, t_steps = _two_axis_strides(places[0, :, 0] - first)
    d_sizes, d_steps = _two_axis_strides(places[0, 0] - first)
    strides = _Strides(first, (heads, *t_sizes, *d_sizes), (head_step, *t_steps, *d_steps))

    every = torch.arange(2 * heads * tokens * numbers)
    last = first + sum(
        (size - 1) * step for size, step in zip(strides.sizes, strides.steps, strict=True)
    )
    if min(strides.steps) < 0 or last >= len(every):
        return None
    viewed = every.as_strided(strides.sizes, strides.steps, first)
    return strides if torch.equal(viewed.reshape(places.shape), places) else None


def _two_axis_strides(places: torch.Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return sizes and steps of two axes that may give these places, which begin with 0."""
    count = len(places)
    step = int(places[1]) if count > 1 else 0
    # The first place that the step does not give begins the second group.
    odd = (places != torch.arange(count) * step).nonzero()
    size = int(odd[0]) if len(odd) else count
    if count % size:
        size = count
    return (count // size, size), (int(places[size]) if size < count else 0, step)


def write_rows(
    layer: Any, cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write K (rotated) and V, each `[kv_heads, tokens, head_dim]`, to a layer's cache.

    `slots` are `block * block_tokens + offset`.
    """
    keys, values = (
        _heads_together(part.transpose(0, 1).to(cache.device)) for part in (keys, values)
    )
    upstream.write_rows(layer, cache, keys, values, slots)


def _heads_together(rows: torch.Tensor) -> torch.Tensor:
    # Kernels for GPUs want the heads of a token side by side, and nothing else.
    if rows.device.type != "cpu" and rows.stride()[1:] == (rows.shape[-1], 1):
        return rows
    return rows.contiguous()


def slots_of(block_ids: Sequence[int], block_tokens: int, places: torch.Tensor) -> torch.Tensor:
    """Return the slots of a request's tokens at `places`, int64."""
    places = places.cpu()
    return (
        torch.tensor(block_ids, dtype=torch.int64)[places // block_tokens] * block_tokens
        + places % block_tokens
    )


def tokens_of(
    layer: Any, cache: torch.Tensor, block_tokens: int, blocks: int, dtype: torch.dtype
) -> torch.Tensor:
    """Find out which token of a block each byte of a layer's page belongs to.

    Writes to a block and clears it again.

    Returns
    -------
    Tensor, shape [bytes], int16
        Number of the token in the block.

    Raises
    ------
    ConfigError
        A byte belongs to no token, or to several.
    """
    page = bytes_of(cache, blocks)[1]
    token = torch.zeros(page.shape, dtype=torch.int16, device=page.device)
    places = torch.arange(block_tokens)
    # A latent cache is known to have a row for each token.
    if upstream.is_latent(layer):
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
                ones = (
                    (places >> bit & 1)
                    .eq(digit)
                    .to(page.device, dtype)
                    .view(-1, 1, 1)
                    .expand(-1, heads, width // 2)
                )
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
    """View a layer's cache by vLLM's blocks, `[blocks, kernel blocks, ..., bytes]`.

    A block of vLLM's consists of one or more kernel blocks.
    """
    return cache.view(torch.uint8).unflatten(0, (blocks, -1))


def reader_for(
    layers: Mapping[str, Any], caches: Mapping[str, torch.Tensor], block_tokens: int
) -> Reader:
    """Return the reader that gives back, bit for bit, what `do_kv_cache_update` wrote.

    The layout is observed in the first layer and proven in each. Call this while nothing is cached,
    since it writes to two blocks and clears them again.

    Raises
    ------
    ConfigError
        No reader does so.
    """
    name = next(iter(caches))
    reader = observed_reader(layers[name], caches[name], block_tokens)
    # The order was observed in one layer, so it is proven in each.
    if reader is None or not all(
        _round_trip(reader, layers[name], cache) for name, cache in caches.items()
    ):
        raise _unreadable(layers.values())
    return reader


def _unreadable(layers: Iterable[Any]) -> ConfigError:
    kinds = sorted({upstream.attention_of(layer) for layer in layers})
    return ConfigError(
        f"the KV layout of {', '.join(kinds)} could not be read back: a write-read round trip "
        "failed."
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

    # A generator of its own: drawing from torch's global one might change the server's samples.
    generator = torch.Generator().manual_seed(0)
    shape = (heads, count, width // 2)
    keys, values = (
        torch.randn(shape, generator=generator).to(cache.dtype).to(cache.device) for _ in range(2)
    )

    slots = slots_of(block_ids, tokens, torch.arange(count)).to(cache.device)
    write_rows(layer, cache, keys, values, slots)
    index = torch.tensor(block_ids, device=cache.device)

    try:
        read_back = (
            blocks.transpose(0, 1).flatten(4, 5).flatten(1, 3)[:, :count]
            for blocks in reader(cache.index_select(0, index))
        )
        return all(
            torch.equal(read, written)
            for read, written in zip(read_back, (keys, values), strict=True)
        )
    finally:
        cache[index] = 0


class PagedKV:
    """All layers' KV caches, read and written by pages or by KV entries.

    A page of a prompt is what all layers hold for as many tokens, whatever block of its group a
    layer holds it in. Create it before any request runs, since it writes to the caches.

    Parameters
    ----------
    layers : Mapping[str, Attention]
        Attention modules by name.
    caches : Mapping[str, Tensor]
        Cache of each layer, `[kernel blocks, ...]`.
    block_tokens : int
        Tokens of a block of vLLM's.
    blocks : int
        Number of vLLM's blocks, each of one or more kernel blocks.
    dtype : torch.dtype
        Dtype of the model, which its attention gives a cache.
    groups : Mapping[str, int] or None
        KV cache group of each layer, by name; None if there is one group.
    entries : bool
        Whether KV entries can be read and written, as blends need.
    states : StatePages or None
        Blocks of recurrent layers, whose caches are not among `caches`.

    Raises
    ------
    ConfigError
        It cannot be found out which byte is which token's, or entries cannot be read back.
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
        states: StatePages | None = None,
    ) -> None:
        self.layers = layers
        self.states = states
        self._groups = [(groups or {}).get(name, 0) for name in caches]
        self.caches = caches
        self.block_tokens = block_tokens
        self._named_caches = list(caches.items())
        self._pages = [bytes_of(cache, blocks) for cache in caches.values()]
        self._sizes = [pages[0].numel() for pages in self._pages]
        # Without any such layer a page is one byte, by which a prompt's beginning is known.
        self.page_bytes = sum(self._sizes) or 1

        first_cache = next(iter(caches.values()), None)
        if first_cache is not None:
            self.dtype, self.device = first_cache.dtype, first_cache.device
        else:
            assert states is not None
            self.dtype, self.device = dtype, states.device
        self.copies = DeviceCopies.of(self.device)
        layer_tokens = (
            tokens_of(layers[name], cache, block_tokens, blocks, dtype)
            for name, cache in self._named_caches
        )
        padding = torch.zeros(self.page_bytes - sum(self._sizes), dtype=torch.int16)
        self._byte_tokens = torch.cat([each.to(self.device) for each in (*layer_tokens, padding)])

        if entries:
            assert first_cache is not None
            self.reader: Reader = reader_for(layers, caches, block_tokens)
            _, self.kv_heads, _, width = first_cache.shape
            self.head_dim = width // 2

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's state in all layers."""
        return self.page_bytes // self.block_tokens

    # Whole pages

    def pages_shape(self, tokens: int) -> tuple[int, int]:
        """Return the shape `[pages, bytes]` of the pages of so many tokens, in all layers."""
        return -(-tokens // self.block_tokens), self.page_bytes

    def lacks(self, tables: Tables, start: int, stop: int) -> bool:
        """Tell whether a group has dropped tokens between `start` and `stop - 1`.

        Such tokens lie outside of the group's window.
        """
        return any(
            0 in tables[group][start // self.block_tokens : -(-stop // self.block_tokens)]
            for group in set(self._groups)
        )

    def copy_pages(
        self, tables: Tables, tokens: int, first: int = 0, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Copy pages out of a request's blocks.

        Parameters
        ----------
        tables : Tables
            Blocks of the request in each KV cache group.
        tokens : int
            Number of tokens from the first page on.
        first : int
            Index of the first page.
        out : Tensor, shape [pages, bytes], uint8, or None
            Memory for the copy, on the cache's device.

        Returns
        -------
        Tensor, shape [pages, bytes], uint8
            Bytes of tokens behind the last one, perhaps another request's, are 0.
        """
        count, size = self.pages_shape(tokens)
        pages = (
            torch.empty((count, size), dtype=torch.uint8, device=self.device)
            if out is None
            else out
        )
        indexes = {
            group: self.copies.upload(
                torch.tensor(tables[group][first : first + count], dtype=torch.int64)
            )
            for group in set(self._groups)
        }
        if not self._sizes:
            return pages.zero_()
        for cache, group, page in zip(
            self._pages, self._groups, pages.split(self._sizes, dim=1), strict=True
        ):
            torch.index_select(cache, 0, indexes[group], out=page.unflatten(1, cache.shape[1:]))

        # Another request's state must not get into a stored page.
        rest = tokens % self.block_tokens
        if rest:
            pages[-1].masked_fill_(self._byte_tokens >= rest, 0)
        return pages

    def put_pages(self, tables: Tables, pages: torch.Tensor, first: int = 0) -> None:
        """Write pages `[pages, bytes]` to a request's blocks from index `first` on.

        In each group the blocks inside of its window are written.
        """
        indexes: dict[int, torch.Tensor] = {}
        windows: dict[int, torch.Tensor | None] = {}
        for group in set(self._groups):
            index = torch.tensor(tables[group][first : first + len(pages)], dtype=torch.int64)
            # 0 stands for a block outside of the group's window.
            inside = index.nonzero().squeeze(1)
            indexes[group] = self.copies.upload(index[inside])
            windows[group] = self.copies.upload(inside) if len(inside) < len(pages) else None

        if not self._sizes:
            return
        parts = pages.to(self.device).split(self._sizes, dim=1)
        for cache, group, part in zip(self._pages, self._groups, parts, strict=True):
            page, window = part.unflatten(1, cache.shape[1:]), windows[group]
            cache.index_copy_(
                0, indexes[group], page if window is None else page.index_select(0, window)
            )

    # KV entries

    def shape(self, tokens: int) -> tuple[int, ...]:
        """Return the shape of entries: `[2, layers, kv_heads, tokens, head_dim]`."""
        return (2, len(self.caches), self.kv_heads, tokens, self.head_dim)

    def entries(self, pages: torch.Tensor, tokens: int) -> torch.Tensor:
        """Take the KV entries of the first `tokens` tokens out of pages, in any thread."""
        state = torch.empty(self.shape(tokens), dtype=self.dtype, device=pages.device)
        whole = tokens // self.block_tokens
        full, rest = whole * self.block_tokens, tokens % self.block_tokens

        for into, part in zip(state, self.split(pages), strict=True):
            # Axes are now [layers, kv_heads, blocks, t1, t2, d1, d2].
            blocks = part.movedim(0, 2)
            sizes = blocks.shape[3:]
            into[:, :, :full].unflatten(2, (whole, *sizes[:2])).unflatten(-1, sizes[2:]).copy_(
                blocks[:, :, :whole]
            )
            if rest:
                into[:, :, full:] = blocks[:, :, whole].flatten(4, 5).flatten(2, 3)[:, :, :rest]
        return state

    def split(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split pages into K and V, each `[pages, layers, kv_heads, t1, t2, d1, d2]`.

        See `Reader`. Pages of all layers are read at once.
        """
        shape = (len(pages), len(self.caches), self.kv_heads, self.block_tokens, 2 * self.head_dim)
        return self.reader(pages.view(self.dtype).view(shape))

    def gather(self, block_ids: Sequence[int], tokens: int) -> torch.Tensor:
        """Copy the entries of a request's first `tokens` tokens, on the cache's device."""
        return self.entries(self.copy_pages((tuple(block_ids),), tokens), tokens)

    def scatter(self, block_ids: Sequence[int], start: int, state: torch.Tensor) -> None:
        """Write entries `[2, layers, kv_heads, n, head_dim]` to tokens from `start` on."""
        places = torch.arange(start, start + state.shape[3])
        slots = self.copies.upload(slots_of(block_ids, self.block_tokens, places))
        for layer, (name, cache) in enumerate(self.caches.items()):
            write_rows(self.layers[name], cache, state[0, layer], state[1, layer], slots)

    def attention(self, layer: int) -> Any:
        """Return the attention module of a layer."""
        return self.layers[self._named_caches[layer][0]]

    def page_index(self, block_ids: Sequence[int], tokens: int) -> torch.Tensor:
        """Return the blocks of a request's first `tokens` tokens, on the cache's device."""
        blocks = block_ids[: -(-tokens // self.block_tokens)]
        return self.copies.upload(torch.tensor(blocks, dtype=torch.int64))

    def keys(self, index: torch.Tensor, layer: int, tokens: int) -> torch.Tensor:
        """Copy a layer's rotated K of the first `tokens` tokens, `[kv_heads, tokens, head_dim]`.

        They are float32.

        `index` is that of `page_index`.
        """
        keys, _ = self.reader(self._named_caches[layer][1].index_select(0, index))
        # Axes are now [kv_heads, blocks, t1, t2, d1, d2].
        keys = keys.transpose(0, 1)
        copied = torch.empty(keys.shape, dtype=torch.float32, device=self.device)
        return copied.copy_(keys).flatten(4, 5).flatten(1, 3)[:, :tokens]
