"""One operation for the state of donors, over all layers: split K and V, move K, put rows in place.

Its source are raw pages as they are stored, or rows; its target rows, or the paged KV cache. On a
GPU it is one launch of a Triton kernel (`kernels`). Elsewhere, and wherever the kernel cannot be
used, it is a batch of operations of torch with the same result.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.engines.vllm.blend.model import LayerRotaryTables
from dejakv.engines.vllm.blend.row_memory import (
    RotaryLayout,
    RowMemory,
    cache_memory,
    dense_memory,
    pages_memory,
    rotary_layout,
)
from dejakv.engines.vllm.pages import PagedKV, slots_of

Ids = NDArray[np.int64]

log = logging.getLogger("dejakv.vllm")

BATCH_BYTES = 512 << 20
"""Bytes that operations of torch take at once, in float32."""
NO_TRITON = "Triton cannot be imported"
NO_STRIDES = "the KV layout has no strides that the kernel knows"
NO_TABLES = "layers have rotary tables of different shapes"
FAILED = "the kernel failed"
WRONG = "the kernel gave other values than torch"
"""Why the kernel is not used."""


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
        # Rounding differs by the last bit at most; in float32 by that of each product, too.
        limit = (16 if paged.dtype == torch.float32 else 2) * torch.finfo(paged.dtype).eps
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
