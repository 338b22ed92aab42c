"""One operation for the state of donors, over all layers: split K and V, move K, put rows in place.

Its source are raw pages as they are stored, or rows; its target rows, or the paged KV cache. On a
GPU it is one launch of a Triton kernel (`kernels`), and so are the offsets of a layer. Elsewhere,
and wherever a kernel cannot be used, it is a batch of operations of torch with the same result.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.blend.offsets import OffsetCorrection, corrected
from dejakv.engines.vllm.blend.correction_table import CorrectionTable
from dejakv.engines.vllm.blend.rotary import LayerRotaryTables
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


class Kernels(NamedTuple):
    """The kernels, each of which is one launch.

    Attributes
    ----------
    copy_rows : Callable[..., None]
        Called with the source, the target, the slots and the rotary tables, see `FusedCopy.copy`.
        Without tables keys are copied as they are.
    correct_rows : Callable[..., None]
        Called as `FusedCopy.correct`, but with the donors' state and the KV cache as `RowMemory`.
    """

    copy_rows: Callable[..., None]
    correct_rows: Callable[..., None]


def triton_kernels() -> Kernels:
    """Return the Triton kernels.

    Raises
    ------
    ImportError
        Triton is not installed, or does not run here.
    """
    from dejakv.engines.vllm.blend.kernels import copy_rows, correct_rows

    return Kernels(copy_rows, correct_rows)


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
        self._kernels: Kernels | None = None
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
        if self._kernels is not None:
            try:
                self._kernels.copy_rows(source, target, index, self._layout if moves else None)
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
        if self._kernels is None:
            self._paged.scatter(block_ids, first, state[:, :, :, first:end])
            return
        rows = torch.arange(first, end)
        slots = slots_of(block_ids, self._paged.block_tokens, rows)
        index = torch.stack([rows, slots, rows, rows]).numpy()
        self.copy(dense_memory(state), self.cache, index, moves=False)

    @property
    def block_tokens(self) -> int:
        """Tokens of a KV block."""
        return self._paged.block_tokens

    def upload(self, numbers: Any) -> torch.Tensor:
        """Copy a small tensor to the device (see `DeviceCopies.upload`)."""
        return self._paged.copies.upload(numbers)

    def correction_table(
        self, moves: Sequence[OffsetCorrection], slots: torch.Tensor
    ) -> CorrectionTable | None:
        """Join corrections in host memory, whose rows have these slots; None without a kernel."""
        return None if self._kernels is None else CorrectionTable.of(moves, slots, self.upload)

    def correct(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: torch.Tensor,
        state: torch.Tensor,
        table: CorrectionTable,
    ) -> None:
        """Write rows of one layer to the KV cache, moved by what computed rows show.

        Parameters
        ----------
        key, value : Tensor, shape [tokens, kv_heads, head_dim]
            K (rotated) and V of a forward.
        rows : Tensor, shape [k]
            Which of these tokens are the computed rows, in their order.
        state : Tensor, shape [2, layers, kv_heads, n, head_dim]
            The donors' state, by rows of the prompt.
        table : CorrectionTable
            The corrections.

        Raises
        ------
        RuntimeError
            The kernel failed. It is not used again.
        """
        assert self._kernels is not None
        try:
            memory = dense_memory(state)
            self._kernels.correct_rows(layer, key, value, rows, memory, self.cache, table)
        except Exception as error:
            self._fall_back(FAILED, error)
            raise

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
            self._kernels = triton_kernels()
        # What Triton finds missing in an environment are errors of many kinds.
        except Exception as error:
            self._fall_back(NO_TRITON, error)
            return
        try:
            right = self._copies_right()
            # A kernel that fails is given up already.
            if not right or (self._kernels is not None and not self._corrects_right()):
                self._fall_back(WRONG)
        except Exception as error:
            if self._kernels is not None:
                self._fall_back(FAILED, error)

    def _copies_right(self) -> bool:
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
        return torch.equal(read[1], moved[1]) and self._near(read[0], moved[0])

    def _corrects_right(self) -> bool:
        """Correct rows of a block by the others, in the last layer, by the kernel."""
        paged, layer = self._paged, len(self._paged.caches) - 1
        count = paged.block_tokens
        generator = torch.Generator().manual_seed(0)
        shape = (3, count, paged.kv_heads, paged.head_dim)
        key, value, noise = torch.randn(shape, generator=generator).to(paged.dtype).to(paged.device)
        state = torch.zeros(paged.shape(count), dtype=paged.dtype, device=paged.device)
        state[0, layer], state[1, layer] = noise.transpose(0, 1), key.transpose(0, 1)
        anchors, rest = torch.arange(0, count, 2), torch.arange(1, count, 2)
        weights = torch.rand(len(rest), len(anchors), generator=generator)
        move = OffsetCorrection(rest, anchors, anchors, weights)
        slots = slots_of([1], count, rest)
        table = self.correction_table([move], slots)
        assert table is not None

        try:
            self.correct(layer, key, value, self.upload(torch.arange(count)), state, table)
            read = paged.entries(paged.copy_pages(((1,),), count), count)
        finally:
            for cache in paged.caches.values():
                cache[1] = 0

        move = OffsetCorrection(*map(self.upload, (rest, anchors, anchors, weights)))
        fresh = torch.stack((key, value)).transpose(1, 2)
        expected = corrected(state[:, layer], fresh, move)
        return self._near(read[:, layer].index_select(2, move.rest), expected)

    def _near(self, values: torch.Tensor, expected: torch.Tensor) -> bool:
        # Rounding differs by the last bit at most; in float32 by that of each product, too.
        dtype = self._paged.dtype
        limit = (16 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps
        distance = (values.float() - expected.float()).abs()
        return bool((distance <= limit * (1 + expected.float().abs())).all())

    def _fall_back(self, why: str, error: Exception | None = None) -> None:
        self._kernels = None
        self._fallbacks.append(why)
        log.warning(
            "state of blends is copied by operations of torch in place of one kernel: %s%s",
            why,
            "" if error is None else f" ({type(error).__name__}: {error})",
        )
