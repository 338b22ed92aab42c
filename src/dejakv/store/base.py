"""The interface of a store, and its unit: a chunk, the computed state of one prompt."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dejakv.identity import Span

KV = "kv"
"""Kind of a chunk with the exact state of a prompt."""

NODE = "node"
"""Kind of a chunk that holds rows for other chunks alone, and stands for no prompt: see `deltas`."""

ROWS = "rows"
"""Kind of a chunk with rows of a blended prompt that were computed in every layer. They serve later blends alone."""

Rows = Sequence[tuple[int, int]]
"""Ranges of rows `[start, stop)`, of the whole prompt."""


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
    kind     `KV`: exact state of a prompt; `NODE`: exact rows that several prompts share; others (`ROWS`) are never used as such
    space    the levels' space it is indexed in (`Query.space`)
    vectors  latent and text vectors by layer, so that a restart embeds nothing again
    embedder fingerprint of the vectors' embedder; vectors of others are ignored
    answer   the model's answer, if kept (reports and guards compare it); never served from here

    parent, rows_from     id of the chunk that holds the first `rows_from` rows, exactly its own; the tensor holds the others.
                          Empty and 0: the tensor holds all
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
    parent: str = ""
    rows_from: int = 0
    position: int = 0
    generation: int = 0
    ttl: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def as_node(meta: ChunkMeta) -> ChunkMeta:
    """What remains of a prompt's description if its rows stay for others: nothing that tells of the prompt but its tokens."""
    return replace(
        meta, kind=NODE, prompt="", chunk="", space="", embedder="", vectors={}, answer=None, metadata={}, ttl=0.0
    )


def may_split(held: ChunkMeta, node: ChunkMeta, rest: ChunkMeta) -> bool:
    """Whether a held entry is still the one that was split into `node` and `rest`."""
    return (held.parent, held.rows_from, held.kind) == (node.parent, node.rows_from, rest.kind)


@dataclass(frozen=True)
class Chunk:
    """State of a prompt, or of a part of it. For KV: `tensor` is stacked `[2 (K, V), layers, kv_heads, tokens, head_dim]`, K as
    the model cached it (rotated for positions `meta.position` and following).

    rows  those that the tensor holds, where these are not all of `meta`: see `load_beginning`
    """

    meta: ChunkMeta
    tensor: Tensor
    rows: Rows | None = None

    def read(self, rows: Rows) -> "Sequence[Chunk]":
        """See `Donor`: it is read already."""
        return (self,)

    def whole(self) -> "Chunk":
        """See `Donor`."""
        return self


@dataclass(frozen=True)
class StoreStats:
    """Counters since the store was opened; `entries` (prompts) and `bytes` are its present content."""

    entries: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    puts: int = 0
    refused: Mapping[str, int] = field(default_factory=dict[str, int])
    evictions: Mapping[str, int] = field(default_factory=dict[str, int])
    corrupt: int = 0


class Store(Protocol):
    """Thread-safe. Reading never raises: missing, foreign or damaged data is None and counted. Failed writing (full,
    slow, read-only) returns False and is counted by reason.

    The stores that keep chunks themselves keep parents and deltas as they come, and are `Parents`; what their callers use
    is a `DeltaStore` around them, which splits and assembles."""

    def put(self, chunk: Chunk) -> bool: ...

    def get(self, id: str) -> Chunk | None: ...

    def meta(self, id: str) -> ChunkMeta | None: ...

    def metas(self, partition: str | None = None, epoch: str | None = None) -> Iterator[ChunkMeta]: ...

    def delete(self, id: str) -> bool: ...

    def clear(self, partition: str | None = None) -> int: ...

    def stats(self, partition: str | None = None) -> StoreStats: ...

    def on_evict(self, listener: Callable[[str], None]) -> None:
        """Calls `listener(id)` after an entry left the store for any reason (evicted, deleted, corrupt)."""
        ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Admits(Protocol):
    """A store that decides whether to take a state before it is copied out of the engine."""

    def wants(self, id: str, tokens: int, partition: str) -> bool: ...


@runtime_checkable
class Touches(Protocol):
    """A store that orders entries by use, and learns of uses served by a tier in front."""

    def touch(self, id: str) -> None: ...


@runtime_checkable
class Notices(Protocol):
    """A store that other processes also write to."""

    def notice(self) -> bool:
        """Tells the listeners which entries other processes have removed. False if some may have been missed."""
        ...


@runtime_checkable
class LoadsParts(Protocol):
    """A store that hands out a prompt's state as it holds it, so that nothing is put together in vain."""

    def get_parts(self, id: str, rows: Rows) -> Sequence[Chunk] | None:
        """What holds the given rows, first rows first: each chunk has those from its `rows_from` on. None as `get`."""
        ...


@runtime_checkable
class Parents(Protocol):
    """A store whose chunks may hold only the rows that their parents do not.

    `put` refuses a chunk whose parent is missing (`parent`). An entry with children is evicted after them. `delete` of one
    turns it into a node, which goes with its last child. A replaced entry keeps its children.
    """

    def split(self, node: Chunk, rest: Chunk) -> bool:
        """Puts `node` between an entry and its parent: `rest` is the entry with the rows that remain to it.

        All or nothing. False if the entry has changed or left, or `node` is there already.
        """
        ...

    def discard(self, id: str) -> None:
        """Removes an entry that cannot be read, and all that need its rows."""
        ...


@runtime_checkable
class TakesParts(Protocol):
    """A store that takes a prompt's state in several deliveries, its first rows first. Nobody finds the prompt before the last."""

    def put_part(self, chunk: Chunk) -> bool:
        """Takes some of a prompt's rows: those from `rows_from` of its description on. No part may end inside a medium.

        False if they cannot be stored, or those before them have left: then the prompt is not stored, and the caller calls
        `drop_parts`."""
        ...

    def drop_parts(self, meta: ChunkMeta, ends: Sequence[int]) -> None:
        """Removes what was delivered of a prompt, but for rows that stored prompts need. `ends`: row behind each part."""
        ...


@runtime_checkable
class TellsNew(Protocol):
    """A store that can tell what came since it was asked last, without reading all that is there."""

    def added(self, mark: Any = None) -> tuple[list[ChunkMeta], Any]:
        """Descriptions of what any process stored since `mark` was handed out, perhaps of more, and the next mark. None: of
        all."""
        ...


@runtime_checkable
class Scrubs(Protocol):
    """A store that leaves traces of removed entries: in a log, or in files that are set aside."""

    def scrub(self, partition: str | None = None) -> None:
        """Removes the traces, those of one partition at least. Raises: StoreError if they cannot be removed now."""
        ...
