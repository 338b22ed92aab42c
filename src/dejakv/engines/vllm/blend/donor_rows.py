"""Donors' rows of a blend, brought to the device of the KV cache in the order of the prompt.

On the CPU rows are copied by runs, since nothing is as fast there as long copies. On a GPU raw
pages go up, and one operation for all layers splits K and V, moves K and puts rows in order.
"""

import numpy as np
import torch

from dejakv.blend.slices import copy_rows
from dejakv.engines.tensors import tensor_view
from dejakv.engines.vllm.blend.fused import FusedCopy, Ids
from dejakv.engines.vllm.blend.row_memory import RowMemory, dense_memory, pages_memory
from dejakv.engines.vllm.pages import BufferPool, LentBuffer, PagedKV
from dejakv.store.base import KV, StoredState

BATCH_BYTES = 512 << 20
"""Bytes of raw pages that are on a GPU at once, beside the rows made of them."""


def donor_rows(
    paged: PagedKV, fused: FusedCopy, buffers: BufferPool, source: Ids, first: int
) -> "DonorRows":
    """Return memory for the donors' rows of a prompt.

    Parameters
    ----------
    source : Ids
        Positions in the donors of the prompt's tokens from `first` on.
    """
    if paged.copies.is_host:
        return DonorRows(paged, fused, buffers, source, first)
    return DeviceDonorRows(paged, fused, source, first)


class DonorRows:
    """Donors' rows in lent host memory, which is copied by runs.

    Attributes
    ----------
    state : Tensor, shape [2, layers, kv_heads, tokens, head_dim]
        The rows at their places in the prompt, with keys moved once `finish` was called.
    buffer : LentBuffer or None
        Memory of `state`, to be given back after use.
    """

    state: torch.Tensor
    buffer: LentBuffer | None = None

    def __init__(
        self, paged: PagedKV, fused: FusedCopy, buffers: BufferPool, source: Ids, first: int
    ) -> None:
        self._paged = paged
        self._fused = fused
        self._source = source
        self._first = first
        self._buffers = buffers
        self.buffer = buffers.lend(paged.shape(first + len(source)), paged.dtype)
        self.state = self.buffer.tensor

    def add(self, part: StoredState, places: Ids, rows: Ids) -> None:
        """Copy tokens of a part to rows of the prompt.

        Parameters
        ----------
        part : StoredState
            Part of a donor's state.
        places : Ids
            Places of the tokens in the donor, all within the part.
        rows : Ids
            Rows of the prompt, one for each place.
        """
        state, first = tensor_view(part.tensor), part.first
        if part.meta.kind == KV:
            pages, first = _pages_of(part, state, places, self._paged.block_tokens)
            stop = min(first + len(pages) * self._paged.block_tokens, part.stop)
            state = self._paged.entries(pages, stop - first)
        copy_rows(state, places - first, self.state, rows)

    def finish(self) -> None:
        """Move the keys of all rows from the donors' positions to their own."""
        # Keys are stored rotated for the donors' places: all are turned at once to the new ones.
        rows = torch.arange(self._first, self._first + len(self._source))
        keys = self.state[0, :, :, self._first :]
        self._fused.rotary.move(keys, torch.from_numpy(self._source), rows)

    def release(self) -> None:
        """Give the memory back unused."""
        if self.buffer is not None:
            self._buffers.take_back(self.buffer)


class DeviceDonorRows(DonorRows):
    """Donors' rows in the memory of a GPU, made of raw pages in batches."""

    def __init__(self, paged: PagedKV, fused: FusedCopy, source: Ids, first: int) -> None:
        self._paged = paged
        self._fused = fused
        self._source = source
        self._first = first
        _, layers, heads, tokens, width = paged.shape(first + len(source))
        # A token's heads lie side by side, as kernels that write to the cache want them.
        by_token = torch.empty(
            (2, tokens, layers, heads, width), dtype=paged.dtype, device=paged.device
        )
        self.state = by_token.permute(0, 2, 3, 1, 4)
        self._pages: list[torch.Tensor] = []
        self._slots: list[Ids] = []
        self._rows: list[Ids] = []

    def add(self, part: StoredState, places: Ids, rows: Ids) -> None:
        """Upload tokens of a part (see `DonorRows.add`)."""
        state = tensor_view(part.tensor)
        if part.meta.kind != KV:
            low, high = int(places.min()) - part.first, int(places.max()) + 1 - part.first
            fresh = state[:, :, :, low:high].to(self._paged.device)
            self._place(dense_memory(fresh), places - part.first - low, rows)
            return

        pages, first = _pages_of(part, state, places, self._paged.block_tokens)
        before = sum(len(each) for each in self._pages) * self._paged.block_tokens
        self._pages.append(pages.to(self._paged.device))
        self._slots.append(places - first + before)
        self._rows.append(rows)
        if sum(each.nbytes for each in self._pages) >= BATCH_BYTES:
            self.finish()

    def finish(self) -> None:
        """Put the rows of the uploaded pages in order, with their keys moved."""
        if not self._pages:
            return
        pages = self._pages[0] if len(self._pages) == 1 else torch.cat(self._pages)
        slots, rows = np.concatenate(self._slots), np.concatenate(self._rows)
        self._place(pages_memory(self._paged, pages), slots, rows)
        self._pages, self._slots, self._rows = [], [], []

    def release(self) -> None:
        """Free the memory unused."""

    def _place(self, source: RowMemory, slots: Ids, rows: Ids) -> None:
        index = np.stack([slots, rows, self._source[rows - self._first], rows])
        self._fused.copy(source, dense_memory(self.state), index)


def _pages_of(
    part: StoredState, state: torch.Tensor, places: Ids, block: int
) -> tuple[torch.Tensor, int]:
    """Return the pages of a part that hold these places, and the first token of the first page."""
    low = (int(places.min()) - part.first) // block
    high = -(-(int(places.max()) + 1 - part.first) // block)
    return state[0, 0, 0, low:high], part.first + low * block
