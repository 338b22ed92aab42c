"""One operation for the state of donors, over all layers: split K and V, move K, put rows in place.

Its source are raw pages as they are stored, or rows; its target rows, or the paged KV cache. On a
GPU it is one launch of a Triton kernel (`kernels`). Elsewhere, and wherever the kernel cannot be
used, it is a batch of operations of torch with the same result.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.engines.vllm.blend.model import LayerRotaryTables
from dejakv.engines.vllm.pages import PagedKV, slots_of, write_rows

Ids = NDArray[np.int64]
Split = tuple[torch.Tensor, torch.Tensor]
"""K and V, each `[n, layers, kv_heads, head_dim]`."""

log = logging.getLogger("dejakv.vllm")

BATCH_BYTES = 512 << 20
"""Bytes that operations of torch take at once, in float32."""
NO_TRITON = "Triton cannot be imported"
NO_STRIDES = "the KV layout has no strides that the kernel knows"
NO_TABLES = "layers have rotary tables of different shapes"
FAILED = "the kernel failed"
WRONG = "the kernel gave other values than torch"
"""Why the kernel is not used."""


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


Kernel = Callable[[RowMemory, RowMemory, torch.Tensor, RotaryLayout | None], None]
"""Copies rows as `FusedCopy.copy`. Without rotary tables keys are copied as they are."""


def triton_kernel() -> Kernel:
    """Return the Triton kernel.

    Raises
    ------
    ImportError
        Triton is not installed, or does not run here.
    """
    from dejakv.engines.vllm.blend.kernels import copy_rows

    return copy_rows


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


class FusedCopy:
    """Copies of rows in one worker, for all layers at once.

    Create it before any request runs: on a GPU the kernel is compiled and tried in a block, which
    is cleared again.

    Attributes
    ----------
    cache : RowMemory
        The paged KV cache, to write to.
    rotary : LayerRotaryTables
        Tables to move keys.
    """

    def __init__(self, paged: PagedKV, rotary: LayerRotaryTables) -> None:
        self.cache = cache_memory(paged)
        self._paged = paged
        self.rotary = rotary
        self._kernel: Kernel | None = None
        self._layout: RotaryLayout | None = None
        self._fallbacks: list[str] = []
        if not paged.copies.is_host:
            self._start()

    @torch.inference_mode()
    def copy(self, source: RowMemory, target: RowMemory, slots: Ids, *, moves: bool = True) -> None:
        """Copy rows of K and V of all layers, with keys turned to other positions.

        Keys whose position stays, and all V, are copied bit for bit.

        Parameters
        ----------
        source, target : RowMemory
            Where rows come from and go to. No slot of the target is there twice.
        slots : Ids, shape [4, n]
            For each row: its slot in the source and in the target, and its position before and
            after.
        moves : bool
            False if no position changes.
        """
        index = self._paged.copies.upload(np.ascontiguousarray(slots))
        if self._kernel is not None:
            try:
                self._kernel(source, target, index, self._layout if moves else None)
                return
            except Exception as error:
                self._fall_back(FAILED, error)

        assert source.take is not None
        assert target.put is not None
        moves = moves and bool((slots[2] != slots[3]).any())
        heads, width = source.shape
        # In pieces, since keys are turned in float32.
        rows = max(1, BATCH_BYTES // (4 * source.layers * heads * width))
        for here, there, before, after in zip(*(part.split(rows) for part in index), strict=True):
            keys, values = source.take(here)
            if moves:
                keys = self.rotary.moved(keys, before, after)
            target.put(there, (keys, values))

    def write(self, state: torch.Tensor, first: int, end: int, block_ids: Sequence[int]) -> None:
        """Write rows `first` to `end - 1` of a prompt to its blocks, with keys as they are.

        `state` is `[2, layers, kv_heads, n, head_dim]`, with the rows of the whole prompt.
        """
        if self._kernel is None:
            self._paged.scatter(block_ids, first, state[:, :, :, first:end])
            return
        rows = torch.arange(first, end)
        slots = slots_of(block_ids, self._paged.block_tokens, rows)
        index = torch.stack([rows, slots, rows, rows]).numpy()
        self.copy(dense_memory(state), self.cache, index, moves=False)

    def take_fallbacks(self) -> list[str]:
        """Return why the kernel was given up since the last call; at most one reason."""
        fallbacks, self._fallbacks = self._fallbacks, []
        return fallbacks

    def _start(self) -> None:
        """Use the kernel, if it can be had and is right."""
        self._layout = rotary_layout(self.rotary, self._paged.head_dim)
        if self.cache.steps is None or self._layout is None:
            self._fall_back(NO_TABLES if self.cache.steps else NO_STRIDES)
            return
        try:
            self._kernel = triton_kernel()
        # What Triton finds missing in an environment are errors of many kinds.
        except Exception as error:
            self._fall_back(NO_TRITON, error)
            return
        if not self._is_right():
            self._fall_back(WRONG)

    def _is_right(self) -> bool:
        """Write rows to a block and read them out of its page, moved, both by the kernel."""
        paged = self._paged
        count, positions = paged.block_tokens, self.rotary.tables[0][0].shape[0]
        generator = torch.Generator().manual_seed(0)
        written = torch.randn(paged.shape(count), generator=generator).to(paged.dtype)
        written = written.to(paged.device)
        rows = np.arange(count)
        before, after = rows % positions, (7 * rows + 1) % positions

        try:
            # Block 0 is vLLM's null block.
            self.write(written, 0, count, [1])
            page = pages_memory(paged, paged.copy_pages(((1,),), count))
            read = torch.empty_like(written)
            self.copy(page, dense_memory(read), np.stack([rows, rows, before, after]))
        finally:
            for cache in paged.caches.values():
                cache[1] = 0

        moved = written.clone()
        source, target = (paged.copies.upload(each) for each in (before, after))
        self.rotary.move(moved[0], source, target)
        # Rounding differs by the last bit at most.
        limit = 2 * torch.finfo(paged.dtype).eps
        distance = (read[0].float() - moved[0].float()).abs()
        near = distance <= limit * (1 + moved[0].float().abs())
        return torch.equal(read[1], moved[1]) and bool(near.all())

    def _fall_back(self, why: str, error: Exception | None = None) -> None:
        self._kernel = None
        self._fallbacks.append(why)
        log.warning(
            "state of blends is copied by operations of torch in place of one kernel: %s%s",
            why,
            "" if error is None else f" ({type(error).__name__}: {error})",
        )
