"""The interface of a store, and its unit: a chunk, the computed state of one prompt."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dejakv.identity import Span


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

    id       `identity.exact_key` of the prompt
    kind     `kv`: exact state of a prompt; other kinds are never used as such
    space    the levels' space it is indexed in (`Query.space`)
    vectors  latent and text vectors by layer, so that a restart embeds nothing again
    embedder fingerprint of the vectors' embedder; vectors of others are ignored
    answer   the model's answer, if kept (reports and guards compare it); never served from here

    parent, rows_from     id of the chunk that holds the first `rows_from` rows, exactly its own; the tensor holds the others.
                          Empty and 0: the tensor holds all
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
    kind: str = "kv"
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

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Chunk:
    """State of a prompt. For KV: `tensor` is stacked `[2 (K, V), layers, kv_heads, tokens, head_dim]`, K as the model
    cached it (rotated for positions 0..tokens-1)."""

    meta: ChunkMeta
    tensor: Tensor


@dataclass(frozen=True)
class StoreStats:
    """Counters since the store was opened; `entries` and `bytes` are its present content."""

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
    slow, read-only) returns False and is counted by reason."""

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
class Pinning(Protocol):
    """A store that can keep an entry from being evicted. `pin` is False for an unknown entry."""

    def pin(self, id: str) -> bool: ...

    def unpin(self, id: str) -> None: ...


@runtime_checkable
class Notices(Protocol):
    """A store that other processes also write to."""

    def notice(self) -> bool:
        """Tells the listeners which entries other processes have removed. False if some may have been missed."""
        ...


@runtime_checkable
class TellsNew(Protocol):
    """A store that can tell what came since it was asked last, without reading all that is there."""

    def added(self, mark: Any = None) -> tuple[list[ChunkMeta], Any]:
        """Descriptions of what any process stored since `mark` was handed out, perhaps of more, and the next mark. None: of
        all."""
        ...
