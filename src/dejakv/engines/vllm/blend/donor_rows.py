"""Donors' rows of a blend, brought to the device of the KV cache in the order of the prompt.

On the CPU rows are copied by runs, since nothing is as fast there as long copies. On a GPU raw
pages go up, and one batch of kernels for all layers splits K and V, moves K and puts rows in order.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.blend.slices import copy_rows
from dejakv.engines.tensors import tensor_view
from dejakv.engines.vllm.blend.model import LayerRotaryTables
from dejakv.engines.vllm.pages import BufferPool, LentBuffer, PagedKV
from dejakv.store.base import KV, StoredState

Ids = NDArray[np.int64]

BATCH_BYTES = 512 << 20
"""Bytes of raw pages that are on a GPU at once, beside the rows made of them."""


def donor_rows(
    paged: PagedKV, rotary: LayerRotaryTables, buffers: BufferPool, tokens: int
) -> "DonorRows":
    """Return memory for the donors' rows of a prompt with so many tokens."""
    if paged.copies.is_host:
        return DonorRows(paged, rotary, buffers, tokens)
    return DeviceDonorRows(paged, rotary, tokens)


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
        self, paged: PagedKV, rotary: LayerRotaryTables, buffers: BufferPool, tokens: int
    ) -> None:
        self._paged = paged
        self._rotary = rotary
        self._buffers = buffers
        self.buffer = buffers.lend(paged.shape(tokens), paged.dtype)
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

    def finish(self, source: Ids, first: int) -> None:
        """Move the keys of all rows from `first` on, from positions `source` to their own."""
        # Keys are stored rotated for the donors' places: all are turned at once to the new ones.
        rows = torch.arange(first, first + len(source))
        self._rotary.move(self.state[0, :, :, first:], torch.from_numpy(source), rows)

    def release(self) -> None:
        """Give the memory back unused."""
        if self.buffer is not None:
            self._buffers.take_back(self.buffer)


class DeviceDonorRows(DonorRows):
    """Donors' rows in the memory of a GPU, made of raw pages in batches."""

    def __init__(self, paged: PagedKV, rotary: LayerRotaryTables, tokens: int) -> None:
        self._paged = paged
        self._rotary = rotary
        _, layers, heads, _, width = paged.shape(tokens)
        # A token's heads lie side by side, as kernels that write to the cache want them.
        self._by_token = torch.empty(
            (2, tokens, layers, heads, width), dtype=paged.dtype, device=paged.device
        )
        self.state = self._by_token.permute(0, 2, 3, 1, 4)
        self._pages: list[torch.Tensor] = []
        self._slots: list[Ids] = []
        self._rows: list[Ids] = []

    def add(self, part: StoredState, places: Ids, rows: Ids) -> None:
        """Upload tokens of a part (see `DonorRows.add`)."""
        state = tensor_view(part.tensor)
        if part.meta.kind != KV:
            low, high = int(places.min()) - part.first, int(places.max()) + 1 - part.first
            fresh = state[:, :, :, low:high].to(self._paged.device)
            index = self._paged.copies.upload(np.stack([places - part.first - low, rows]))
            # Axes are now [2, tokens, layers, kv_heads, head_dim].
            fresh = fresh.permute(0, 3, 1, 2, 4).index_select(1, index[0])
            self._by_token.index_copy_(1, index[1], fresh)
            return

        pages, first = _pages_of(part, state, places, self._paged.block_tokens)
        before = sum(len(each) for each in self._pages) * self._paged.block_tokens
        self._pages.append(pages.to(self._paged.device))
        self._slots.append(places - first + before)
        self._rows.append(rows)
        if sum(each.nbytes for each in self._pages) >= BATCH_BYTES:
            self._place()

    def finish(self, source: Ids, first: int) -> None:
        """Move the keys of all rows from `first` on, from positions `source` to their own."""
        self._place()
        if (source == np.arange(first, first + len(source))).all():
            return
        target = np.arange(first, first + len(source))
        index = self._paged.copies.upload(np.stack([source, target]))
        keys = self._by_token[0, first:]
        # In pieces, since keys are turned in float32.
        rows = max(1, BATCH_BYTES // (4 * keys[:1].numel()))
        for piece, source_piece, target_piece in zip(
            keys.split(rows), index[0].split(rows), index[1].split(rows), strict=True
        ):
            piece.copy_(self._rotary.moved(piece, source_piece, target_piece))

    def release(self) -> None:
        """Free the memory unused."""

    def _place(self) -> None:
        """Split the uploaded pages and put their rows in order, for all layers at once."""
        if not self._pages:
            return
        keys, values = self._paged.split(torch.cat(self._pages))
        for into, part in zip(self._by_token, (keys, values), strict=True):
            t1, t2 = part.shape[3:5]
            slots, rows = np.concatenate(self._slots), np.concatenate(self._rows)
            page, token = np.divmod(slots, t1 * t2)
            index = self._paged.copies.upload(np.stack([page, token // t2, token % t2, rows]))
            # Axes are now [pages, t1, t2, layers, kv_heads, d1, d2].
            ordered = part.permute(0, 3, 4, 1, 2, 5, 6)[index[0], index[1], index[2]]
            into.index_copy_(0, index[3], ordered.flatten(3))
        self._pages, self._slots, self._rows = [], [], []


def _pages_of(
    part: StoredState, state: torch.Tensor, places: Ids, block: int
) -> tuple[torch.Tensor, int]:
    """Return the pages of a part that hold these places, and the first token of the first page."""
    low = (int(places.min()) - part.first) // block
    high = -(-(int(places.max()) + 1 - part.first) // block)
    return state[0, 0, 0, low:high], part.first + low * block
