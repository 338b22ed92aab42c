"""Donors' rows of a blend, brought to the device of the KV cache in the order of the prompt.

On the CPU rows are copied by runs, since nothing is as fast there as long copies. On a GPU raw
pages go up, and one operation for all layers splits K and V, moves K and puts rows in order.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from dejakv.blend.slices import copy_rows
from dejakv.engines.tensors import tensor_view
from dejakv.engines.vllm import device
from dejakv.engines.vllm.blend.fused import FusedCopy, Ids
from dejakv.engines.vllm.blend.row_memory import RowMemory, dense_memory, pages_memory
from dejakv.engines.vllm.device import PIN_WAIT_S, CudaCopies, LentRange
from dejakv.engines.vllm.pages import BufferPool, LentBuffer, PagedKV
from dejakv.store.base import KV, StoredState


def donor_rows(
    paged: PagedKV, fused: FusedCopy, buffers: BufferPool, source: Ids, first: int
) -> "DonorRows":
    """Return memory for the donors' rows of a prompt.

    Parameters
    ----------
    source : Ids
        Positions in the donors of the prompt's tokens from `first` on.
    """
    copies = paged.copies
    if isinstance(copies, CudaCopies):
        return DeviceDonorRows(paged, copies, fused, source, first)
    return DonorRows(paged, fused, buffers, source, first)


class DonorRows:
    """Donors' rows in lent host memory, which is copied by runs.

    Attributes
    ----------
    state : Tensor, shape [2, layers, kv_heads, tokens, head_dim]
        The rows at their places in the prompt, with keys moved once `finish` was called.
    buffer : LentBuffer or None
        Memory of `state`, to be given back after use.
    unpinned : bool
        Some rows went to a GPU from memory that is not pinned.
    """

    state: torch.Tensor
    buffer: LentBuffer | None = None
    unpinned: bool = False

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
    """Donors' rows in the memory of a GPU, made of raw pages in batches.

    Batches go up from pinned memory on the stream of loads, while threads fill the next one.
    """

    def __init__(
        self, paged: PagedKV, copies: CudaCopies, fused: FusedCopy, source: Ids, first: int
    ) -> None:
        self._paged = paged
        self._copies = copies
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
        self._on_way: deque[tuple[torch.cuda.Event, LentRange]] = deque()

    def add(self, part: StoredState, places: Ids, rows: Ids) -> None:
        """Upload tokens of a part (see `DonorRows.add`)."""
        state, block = tensor_view(part.tensor), self._paged.block_tokens
        if part.meta.kind != KV:
            low, high = int(places.min()) - part.first, int(places.max()) + 1 - part.first
            wanted = state[:, :, :, low:high]

            def put_rows(memory: torch.Tensor, _: int) -> None:
                fresh = dense_memory(memory.view(wanted.dtype).view(wanted.shape))
                self._place(fresh, places - part.first - low, rows)

            self._bring([wanted], wanted.nbytes, put_rows)
            return

        pages, first = _pages_of(part, state, places, block)
        before = sum(len(each) for each in self._pages) * block
        self._pages.append(pages)
        self._slots.append(places - first + before)
        self._rows.append(rows)
        if sum(each.nbytes for each in self._pages) >= device.UPLOAD_BYTES:
            self._bring_pages()

    def finish(self) -> None:
        """Wait until all rows are in order, with their keys moved."""
        self._bring_pages()
        # Here and not in the engine loop, where the model's next steps would wait behind it.
        self.release()

    def release(self) -> None:
        """Wait for what is on its way: its memory goes to others."""
        self._copies.load_event().synchronize()
        self._on_way.clear()

    def _bring_pages(self) -> None:
        if not self._pages:
            return
        slots, rows = np.concatenate(self._slots), np.concatenate(self._rows)

        def put_pages(pages: torch.Tensor, begin: int) -> None:
            here = slots - begin * self._paged.block_tokens
            inside = (here >= 0) & (here < len(pages) * self._paged.block_tokens)
            if inside.any():
                self._place(pages_memory(self._paged, pages), here[inside], rows[inside])

        self._bring(self._pages, self._paged.page_bytes, put_pages)
        self._pages, self._slots, self._rows = [], [], []

    def _bring(
        self,
        parts: Sequence[torch.Tensor],
        page_bytes: int,
        put: Callable[[torch.Tensor, int], object],
    ) -> None:
        """Copy parts to the device, and use them there as `CudaCopies.load` does."""
        lent = self._pinned(parts) if self._copies.can_load(page_bytes) else None
        if lent is not None:
            event = self._copies.load(lent.tensor.view(-1, page_bytes), put)
            self._on_way.append((event, lent))
            return

        self.unpinned, begin = True, 0
        with self._copies.load_stream():
            for part in parts:
                put(part.to(self._paged.device), begin)
                begin += len(part)

    def _pinned(self, parts: Sequence[torch.Tensor]) -> LentRange | None:
        """Copy parts to pinned memory; None without room, also when earlier ones have gone up."""
        while self._on_way:
            lent = self._copies.pin(parts)
            if lent is not None:
                return lent
            self._on_way[0][0].synchronize()
            self._on_way.popleft()
        return self._copies.pin(parts, PIN_WAIT_S)

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
