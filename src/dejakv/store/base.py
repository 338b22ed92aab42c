"""Values of the store: a chunk is the computed state of a prompt, or of a part of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import StoreError
from dejakv.identity import MediumSpan

KV = "kv"
"""Kind of a chunk with the exact state of a prompt."""

ROWS = "rows"
"""Kind of a chunk with rows of a blended prompt that were computed in every layer. They serve later blends alone."""

INT8 = "int8"
"""Kind of a chunk whose KV entries are stored in 8 bits: of a prompt, or rows of a blend. They serve blends alone."""

Rows = Sequence[tuple[int, int]]
"""Ranges of rows `[start, stop)`, of the whole prompt."""

AXIS = 3
"""Axis of a KV tensor that counts rows: `[2, layers, kv_heads, rows, head_dim]`; or pages of rows: `[1, 1, 1, pages, bytes]`."""

NUMPY_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "|u1", "I64": "<i8"}


class CorruptChunk(StoreError):
    """Stored bytes differ from the written ones. Caught by the store: a counted miss."""


@dataclass(frozen=True)
class Tensor:
    """Raw tensor data without a framework.

    data   C-contiguous array of the element size of `dtype` (bfloat16 as uint16 bit patterns); may be a memory map
    dtype  safetensors name: "F32", "BF16", "F16", "U8", "I64"
    page   rows of a state behind one index of `AXIS`: more than 1 where it consists of an engine's pages
    of     dtype of the KV entries that it holds in 8 bits (`segment.quantized`); empty: it is as it was given
    """

    data: NDArray[Any]
    dtype: str
    page: int = 1
    of: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)

    def rows(self, start: int, stop: int) -> "Tensor":
        """A view of a state's rows `start` to `stop - 1`: of the pages that hold them."""
        # The end is rounded up: the last page may hold fewer rows than it has room for.
        return replace(self, data=self.data[:, :, :, start // self.page : -(-stop // self.page)])


@dataclass(frozen=True)
class ChunkMeta:
    """Description of a chunk without its tensor, to rebuild levels and guards after a restart.

    id       `identity.exact_key` of the prompt; `identity.rows_key` of rows
    kind     `KV`: exact state of a prompt; others (`ROWS`, `encoder`, `fusion`) are never used as such
    space    space of the levels' index (`Query.space`)
    vectors  latent and text vectors by layer, to spare embedding after a restart
    embedder fingerprint of the vectors' embedder; vectors of others are ignored
    answer   the model's answer, if kept (for reports, guards, and the setting `answers`)
    nbytes   size of the tensor; set by the store

    created, ttl          time of computation in seconds since 1970, and seconds of use from then; 0: no limit
    position, generation  position of the first token in its prompt, and depth of approximate state; both 0 for exact state of a
                          prompt
    """

    id: str
    partition: str
    epoch: str
    token_ids: tuple[int, ...]
    prompt: str
    chunk: str
    space: str = ""
    spans: tuple[MediumSpan, ...] = ()
    kind: str = KV
    embedder: str = ""
    vectors: Mapping[str, NDArray[np.float32]] = field(default_factory=dict[str, NDArray[np.float32]])
    answer: str | None = None
    created: float = 0.0
    nbytes: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    position: int = 0
    generation: int = 0
    ttl: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class StoredState:
    """State of a prompt, or of a part of it. For KV: `tensor` is stacked `[2 (K, V), layers, kv_heads, tokens, head_dim]`, K as
    the model cached it (rotated for positions from `meta.position`); or pages as an engine holds them.

    rows  range of the prompt in the tensor, if not all: `[(first, stop)]`
    """

    meta: ChunkMeta
    tensor: Tensor
    rows: Rows | None = None

    @property
    def first(self) -> int:
        """First row of the prompt in the tensor."""
        return self.rows[0][0] if self.rows else 0

    @property
    def stop(self) -> int:
        """Row after the last."""
        return self.rows[-1][1] if self.rows else self.meta.num_tokens

    def read(self, rows: Rows) -> "Sequence[StoredState]":
        """See `engines.base.Donor`: it is read already."""
        return (self,)

    def whole(self) -> "StoredState":
        """See `engines.base.Donor`."""
        return self


@dataclass(frozen=True)
class PrefixHit:
    """Length of a stored prefix, media included; `donor`: id of the prompt it was stored for."""

    donor: str
    tokens: int


@dataclass(frozen=True)
class StoreStats:
    """Counters since the store was opened; `entries` (prompts, rows of blends, named tensors) and `bytes` are its present content.
    `late`: misses because the deadline of a read had come. `bucket_away_seconds`, `feed_away_seconds`: for how long the service has failed; 0: it
    answers, or there is none."""

    entries: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    puts: int = 0
    refused: Mapping[str, int] = field(default_factory=dict[str, int])
    evictions: Mapping[str, int] = field(default_factory=dict[str, int])
    corrupt: int = 0
    late: int = 0
    bucket_away_seconds: float = 0.0
    feed_away_seconds: float = 0.0


def check(tensor: Tensor) -> None:
    """Raises: StoreError for a dtype outside `NUMPY_DTYPES` or unlike the array's, or too many dimensions."""
    # numpy has no bfloat16, so its bit patterns come as uint16: name and array must agree.
    expected = NUMPY_DTYPES.get(tensor.dtype)
    if expected is None or tensor.data.dtype.newbyteorder("<") != np.dtype(expected):
        raise StoreError(
            f"a tensor of dtype {tensor.dtype!r} in an array of {tensor.data.dtype} cannot be stored: "
            f"give one of {', '.join(f'{name} as {kind[1:]}' for name, kind in NUMPY_DTYPES.items())}"
        )
    if tensor.data.ndim > 16:
        raise StoreError(f"a tensor of {tensor.data.ndim} dimensions cannot be stored: 16 at most")


def consecutive(parts: Sequence[StoredState], start: int, stop: int) -> list[Tensor]:
    """Views of rows `start` to `stop - 1` of a prompt's state, from parts with some rows each; a single view if one part has all.
    Empty if a row is missing. Raises: CorruptChunk for parts that do not fit each other.
    """
    # One part with all rows spares the copy that joining several would cost.
    for part in parts:
        if part.first <= start < stop <= part.stop:
            parts = (part,)
            break

    views: list[Tensor] = []
    next_row = start
    for part in sorted(parts, key=lambda one: one.first):
        low, high = max(next_row, part.first), min(stop, part.stop)
        if low >= high:
            continue
        # A gap: state with missing rows is of no use.
        if low != next_row:
            return []
        if views:
            check_alike(part, views[0])
        views.append(part.tensor.rows(low - part.first, high - part.first))
        next_row = high
    return views if next_row == stop else []


def joined(parts: Sequence[StoredState], start: int, stop: int) -> Tensor | None:
    """`consecutive` views as one tensor: a view if a single part has all, None if a row is missing. `start` begins a page, if there are
    pages."""
    views = consecutive(parts, start, stop)
    if len(views) < 2:
        return views[0] if views else None

    data = np.concatenate([view.data for view in views], AXIS)
    # As a view of a stored object is: nobody may change what others share.
    data.flags.writeable = False
    return replace(views[0], data=data)


def check_alike(part: StoredState, state: Tensor) -> None:
    """Raises: CorruptChunk if the part differs from `state` in shape (rows apart), type or page."""
    shape, expected_shape = list(part.tensor.shape), list(state.shape)
    shape[AXIS : AXIS + 1] = expected_shape[AXIS : AXIS + 1] = [0]
    if (shape, part.tensor.dtype, part.tensor.page) != (expected_shape, state.dtype, state.page):
        raise CorruptChunk(f"chunk {part.meta.id}: its rows have another shape than those before them")
