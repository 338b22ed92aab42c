"""K and V of all layers in some memory, by slots: raw pages, rows in order, or the paged KV cache.

Each is described for operations of torch, and by steps in memory for a kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dejakv.engines.vllm.blend.rotary import LayerRotaryTables
from dejakv.engines.vllm.pages import PagedKV, write_rows

Split = tuple[torch.Tensor, torch.Tensor]
"""K and V, each `[n, layers, kv_heads, head_dim]`."""


class Steps(NamedTuple):
    """Steps in memory, in elements, from K of the first slot.

    A slot is token `slot % block` of page `slot // block`. A page's tokens may lie in groups, and
    the numbers of a head in packs.

    Attributes
    ----------
    value : int
        Step from K to V.
    block, group_size, pack_size : int
        Tokens of a page and of a group, and numbers of a pack.
    """

    page: int
    group: int
    token: int
    layer: int
    head: int
    pack: int
    number: int
    value: int
    block: int
    group_size: int
    pack_size: int


@dataclass(frozen=True)
class RowMemory:
    """K and V of all layers in some memory, by slots.

    Attributes
    ----------
    memory : Tensor
        Its first element is the first one of K; with `bases` it only has the dtype.
    layers : int
        Number of layers.
    shape : tuple[int, int]
        KV heads and numbers of a head.
    take : Callable[[Tensor], Split] or None
        Reads slots by operations of torch; None where nothing is read.
    put : Callable[[Tensor, Split], object] or None
        Writes slots by operations of torch; None where nothing is written.
    steps : Steps or None
        None where the kernel cannot be used.
    bases : Tensor, shape [layers], int64, or None
        Address of K of the first slot in each layer; None where layers lie a step apart.
    """

    memory: torch.Tensor
    layers: int
    shape: tuple[int, int]
    take: Callable[[torch.Tensor], Split] | None
    put: "Callable[[torch.Tensor, Split], object] | None"
    steps: Steps | None
    bases: torch.Tensor | None = None


@dataclass(frozen=True)
class RotaryLayout:
    """The rotary tables of all layers, for the kernel.

    Attributes
    ----------
    table : Tensor, shape [positions, 2 * half]
        The first layer's table.
    bases : Tensor, shape [layers], int64
        Address of each layer's table. All have the shape, strides and dtype of the first.
    half : int
        Number of angles.
    neox_style : bool
        Whether the partner of a number lies `half` apart, else beside it.
    """

    table: torch.Tensor
    bases: torch.Tensor
    half: int
    neox_style: bool


def pages_memory(paged: PagedKV, pages: torch.Tensor) -> RowMemory:
    """Describe raw pages `[pages, bytes]`, as they are stored."""
    keys, values = paged.split(pages)
    t1, t2, _, d2 = keys.shape[3:]

    def take(slots: torch.Tensor) -> Split:
        page, token = slots // (t1 * t2), slots % (t1 * t2)
        group, in_group = token // t2, token % t2
        # Axes are now [pages, t1, t2, layers, kv_heads, d1, d2].
        by_token = (part.permute(0, 3, 4, 1, 2, 5, 6) for part in (keys, values))
        keys_taken, values_taken = (part[page, group, in_group].flatten(3) for part in by_token)
        return keys_taken, values_taken

    page, layer, head, group, token, pack, number = keys.stride()
    between = int(values.storage_offset() - keys.storage_offset())
    # Layouts without strides were read into two copies.
    views = values.data_ptr() - keys.data_ptr() == between * keys.element_size()
    steps = Steps(page, group, token, layer, head, pack, number, between, t1 * t2, t2, d2)
    alike = views and keys.stride() == values.stride()
    return RowMemory(keys, keys.shape[1], _sizes(paged), take, None, steps if alike else None)


def dense_memory(state: torch.Tensor) -> RowMemory:
    """Describe rows `[2, layers, kv_heads, n, head_dim]`, whose slots are the rows."""
    by_token = state.permute(0, 3, 1, 2, 4)

    def take(slots: torch.Tensor) -> Split:
        return by_token[0].index_select(0, slots), by_token[1].index_select(0, slots)

    def put(slots: torch.Tensor, rows: Split) -> None:
        for into, part in zip(by_token, rows, strict=True):
            into.index_copy_(0, slots, part)

    value, layer, head, token, number = state.stride()
    _, layers, heads, _, width = state.shape
    steps = Steps(token, 0, 0, layer, head, 0, number, value, 1, 1, width)
    return RowMemory(state[0], layers, (heads, width), take, put, steps)


def cache_memory(paged: PagedKV) -> RowMemory:
    """Describe the paged KV cache, to write to. Slots are vLLM's."""
    caches = list(paged.caches.values())
    layers = [paged.attention(layer) for layer in range(len(caches))]

    def put(slots: torch.Tensor, rows: Split) -> None:
        for number, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
            keys, values = (part[:, number].transpose(0, 1) for part in rows)
            write_rows(layer, cache, keys, values, slots)

    first, steps = _cache_steps(paged, caches)
    size = caches[0].element_size()
    addresses = [cache.data_ptr() + first * size for cache in caches]
    bases = paged.copies.upload(torch.tensor(addresses))
    return RowMemory(caches[0], len(caches), _sizes(paged), None, put, steps, bases)


def _sizes(paged: PagedKV) -> tuple[int, int]:
    return paged.kv_heads, paged.head_dim


def _cache_steps(paged: PagedKV, caches: Sequence[torch.Tensor]) -> tuple[int, Steps | None]:
    """Return where K begins in a block, and the steps; None in place of irregular ones."""
    strides = caches[0].stride()
    if any(cache.stride() != strides for cache in caches):
        return 0, None
    # A block whose elements are their own places in memory is read as any other.
    axes = (torch.arange(size) for size in caches[0].shape[1:])
    h, t, w = torch.meshgrid(*axes, indexing="ij")
    block = (h * strides[1] + t * strides[2] + w * strides[3])[None, None]
    keys, values = (part[0, 0] for part in paged.reader(block))

    first, (t1, t2, _, d2) = int(keys.flatten()[0]), keys.shape[1:]
    between = int(values.flatten()[0]) - first
    # The step of each axis is that of its second element, and must give all of them.
    steps = [
        int(keys.movedim(axis, 0)[1].flatten()[0]) - first if size > 1 else 0
        for axis, size in enumerate(keys.shape)
    ]
    expected = torch.zeros(keys.shape, dtype=torch.int64) + first
    for axis, (size, step) in enumerate(zip(keys.shape, steps, strict=True)):
        expected += (torch.arange(size) * step).view(-1, *[1] * (keys.dim() - axis - 1))
    if not (torch.equal(keys, expected) and torch.equal(values, expected + between)):
        return 0, None

    head, group, token, pack, number = steps
    return first, Steps(strides[0], group, token, 0, head, pack, number, between, t1 * t2, t2, d2)


def rotary_layout(rotary: LayerRotaryTables, head_dim: int) -> RotaryLayout | None:
    """Describe the layers' rotary tables, or return None if the kernel cannot use them."""
    table, neox_style = rotary.tables[0]
    alike = all(
        (each.shape, each.stride(), each.dtype, each.device, style)
        == (table.shape, table.stride(), table.dtype, table.device, neox_style)
        for each, style in rotary.tables
    )
    if not alike or table.stride(1) != 1 or table.shape[1] > head_dim:
        return None
    bases = torch.tensor([each.data_ptr() for each, _ in rotary.tables])
    return RotaryLayout(table, bases.to(table.device), table.shape[1] // 2, neox_style)
