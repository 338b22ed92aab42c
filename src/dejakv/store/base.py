"""The values that a store takes and hands out: a chunk is the computed state of one prompt, or of a part of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import StoreError
from dejakv.identity import Span

KV = "kv"
"""Kind of a chunk with the exact state of a prompt."""

ROWS = "rows"
"""Kind of a chunk with rows of a blended prompt that were computed in every layer. They serve later blends alone."""

Rows = Sequence[tuple[int, int]]
"""Ranges of rows `[start, stop)`, of the whole prompt."""

AXIS = 3
"""Axis of a KV tensor that counts rows: `[2, layers, kv_heads, rows, head_dim]`."""

NUMPY_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "|u1", "I64": "<i8"}


class CorruptChunk(StoreError):
    """Stored bytes differ from the written ones. Stores catch it: to a caller it is a counted miss."""


@dataclass(frozen=True)
class Tensor:
    """Raw tensor data without a framework.

    data   C-contiguous array of the element size of `dtype` (bfloat16 as uint16 bit patterns); may be a memory map
    dtype  safetensors name: "F32", "BF16", "F16", "U8", "I64"
    """

    data: NDArray[Any]
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


@dataclass(frozen=True)
class ChunkMeta:
    """The description of a chunk without its tensor, from which levels and guards are rebuilt after a restart.

    id       `identity.exact_key` of the prompt; `identity.rows_key` of rows
    kind     `KV`: exact state of a prompt; others (`ROWS`, `encoder`, `fusion`) are never used as such
    space    the levels' space it is indexed in (`Query.space`)
    vectors  latent and text vectors by layer, so that a restart embeds nothing again
    embedder fingerprint of the vectors' embedder; vectors of others are ignored
    answer   the model's answer, if kept (reports and guards compare it); never served from here
    nbytes   size of the tensor; set by the store

    created, ttl          seconds since 1970 in which it was computed, and for how many seconds it may be used from then on; 0:
                          without a limit
    position, generation  place of the first token in the prompt that it was computed in, and how often approximate state went
                          into it; both 0 for exact state of a prompt
    """

    id: str
    partition: str
    epoch: str
    token_ids: tuple[int, ...]
    prompt: str
    chunk: str
    space: str = ""
    spans: tuple[Span, ...] = ()
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
class Chunk:
    """State of a prompt, or of a part of it. For KV: `tensor` is stacked `[2 (K, V), layers, kv_heads, tokens, head_dim]`, K as
    the model cached it (rotated for positions `meta.position` and following).

    rows  the range that the tensor holds, where it is not all of the prompt: `[(first, stop)]`
    """

    meta: ChunkMeta
    tensor: Tensor
    rows: Rows | None = None

    @property
    def first(self) -> int:
        """The row of the prompt that the tensor begins with."""
        return self.rows[0][0] if self.rows else 0

    @property
    def stop(self) -> int:
        """The row behind the last one."""
        return self.rows[-1][1] if self.rows else self.meta.num_tokens

    def read(self, rows: Rows) -> "Sequence[Chunk]":
        """See `engines.base.Donor`: it is read already."""
        return (self,)

    def whole(self) -> "Chunk":
        """See `engines.base.Donor`."""
        return self


@dataclass(frozen=True)
class PrefixHit:
    """The first `tokens` tokens of a prompt are stored, media included; `donor` is the id of the prompt they were stored for."""

    donor: str
    tokens: int


@dataclass(frozen=True)
class StoreStats:
    """Counters since the store was opened; `entries` (prompts, rows of blends, named tensors) and `bytes` are its present content."""

    entries: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    puts: int = 0
    refused: Mapping[str, int] = field(default_factory=dict[str, int])
    evictions: Mapping[str, int] = field(default_factory=dict[str, int])
    corrupt: int = 0


def check(tensor: Tensor) -> None:
    """Raises: StoreError if the dtype is not one of `NUMPY_DTYPES`, does not fit the array, or there are too many dimensions."""
    expected = NUMPY_DTYPES.get(tensor.dtype)
    if expected is None or tensor.data.dtype.newbyteorder("<") != np.dtype(expected):
        raise StoreError(
            f"a tensor of dtype {tensor.dtype!r} in an array of {tensor.data.dtype} cannot be stored: "
            f"give one of {', '.join(f'{name} as {kind[1:]}' for name, kind in NUMPY_DTYPES.items())}"
        )
    if tensor.data.ndim > 16:
        raise StoreError(f"a tensor of {tensor.data.ndim} dimensions cannot be stored: 16 at most")


def consecutive(parts: Sequence[Chunk], start: int, stop: int) -> list[Tensor]:
    """Views of rows `start` to `stop - 1` of a prompt's state, of which these parts hold some each, one behind the other; a single
    one where a part has them all. Empty if a row is missing. Raises: CorruptChunk for parts that do not fit each other."""
    for part in parts:
        if part.first <= start < stop <= part.stop:
            parts = (part,)
            break
    views: list[Tensor] = []
    at = start
    for part in sorted(parts, key=lambda one: one.first):
        low, high = max(at, part.first), min(stop, part.stop)
        if low >= high:
            continue
        if low != at:
            return []
        if views:
            check_alike(part, views[0])
        views.append(Tensor(part.tensor.data[:, :, :, low - part.first : high - part.first], part.tensor.dtype))
        at = high
    return views if at == stop else []


def joined(parts: Sequence[Chunk], start: int, stop: int) -> Tensor | None:
    """`consecutive` views as one tensor; None if a row is missing. A view where one part has them all."""
    views = consecutive(parts, start, stop)
    if len(views) < 2:
        return views[0] if views else None
    data = np.concatenate([view.data for view in views], AXIS)
    data.flags.writeable = False
    return Tensor(data, views[0].dtype)


def check_alike(part: Chunk, state: Tensor) -> None:
    """Raises: CorruptChunk unless the part is of the shape and type of `state`, of other rows."""
    shape, wanted = list(part.tensor.shape), list(state.shape)
    shape[AXIS : AXIS + 1] = wanted[AXIS : AXIS + 1] = [0]
    if (shape, part.tensor.dtype) != (wanted, state.dtype):
        raise CorruptChunk(f"chunk {part.meta.id}: its rows have another shape than those before them")
