"""L1.5 by chunk: what a fusion module (an image-text projector, a resampler) put out for a chunk, kept and put back.

It is a view of the encoder registry: a state's tensors live there, under the registry's budget and eviction, keyed by the
chunk. A `FusionProvider` knows how to read them from a model and how to write them back. With a store they also survive
a restart, as chunks of kind "fusion".
"""

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dejakv.decide.levels.base import Status
from dejakv.identity import digest_of
from dejakv.request import DEFAULT_PARTITION, keeping, kept_for, nothing_is_kept
from dejakv.store.age import shortest
from dejakv.store.base import Chunk, ChunkMeta, Tensor
from dejakv.store.store import Store

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class FusionState:
    """The tensors of one chunk by name ("fusion_output", "image_features", ...): numpy arrays of any shape."""

    chunk_id: str
    tensors: Mapping[str, Array]
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def nbytes(self) -> int:
        return sum(int(tensor.nbytes) for tensor in self.tensors.values())


class FusionProvider(Protocol):
    """How to read and write the fusion tensors of a served model (`llm`)."""

    def capture(self, *, llm: Any, request_id: str, chunk_id: str) -> FusionState | None:
        """What the model's fusion modules put out for this request; None if they did not run."""
        ...

    def inject(self, *, llm: Any, request_id: str, state: FusionState) -> bool:
        """Makes the model use the state instead of running its fusion modules; False if it cannot."""
        ...


class _Block(Protocol):
    @property
    def embedding(self) -> Any: ...


class _View(Protocol):
    def lookup(self, content_hash: str, modality: str = "image") -> _Block | None: ...

    def store(self, content_hash: str, modality: str, embedding: Any) -> Any: ...

    def remove(self, content_hash: str, modality: str = "image") -> bool: ...


class EncoderRegistry(Protocol):
    """What is needed of `dejakv.encoder_cache.VisualKVCache`."""

    def view(self, encoder_epoch: str, partition: str = DEFAULT_PARTITION) -> _View: ...


class FusionCache:
    """Fusion states by chunk id, for one model and one partition. Thread-safe; an error of the provider is a miss.

    epoch  fingerprint of the model whose fusion modules these are (`engine.epoch`)
    store  where states survive a restart; None keeps them in the registry alone
    ttl    seconds for which a state may be used, 0 without a limit
    """

    name = "fusion"
    status_names = ("fusion",)

    def __init__(
        self,
        provider: FusionProvider | None,
        registry: EncoderRegistry,
        epoch: str,
        partition: str = DEFAULT_PARTITION,
        store: Store | None = None,
        ttl: float = 0.0,
    ) -> None:
        self.provider = provider
        self.epoch = epoch
        self.partition = partition
        self.counts = {"captured": 0, "injected": 0, "missed": 0, "failed": 0}
        self._view = registry.view(f"fusion:{epoch}", partition)
        self._store = store
        self._ttl = ttl
        self._layouts: dict[str, FusionState] = {}
        self._lock = threading.Lock()

    def capture(self, *, llm: Any, request_id: str, chunk_id: str) -> bool:
        """Reads the model's fusion tensors after a run and keeps them; False if there are none, it failed, or nothing of the
        request is kept."""
        if self.provider is None or nothing_is_kept():
            return False
        try:
            state = self.provider.capture(llm=llm, request_id=request_id, chunk_id=chunk_id)
            if state is None or not state.tensors:
                return False
            self.save(state)
        except Exception:  # a provider is foreign code, and the answer is there already: it costs this state alone
            self._count("failed")
            return False
        self._count("captured")
        return True

    def save(self, state: FusionState) -> None:
        """Keeps a copy of a state, in the registry and, if there is one, in the store.

        Raises InputError, as the registry does, for tensors with NaN or without elements.
        """
        state = FusionState(state.chunk_id, {n: np.array(t) for n, t in state.tensors.items()}, state.metadata)
        empty = {name: np.empty((0, *tensor.shape), tensor.dtype) for name, tensor in state.tensors.items()}
        with self._lock:
            self._layouts[state.chunk_id] = FusionState(state.chunk_id, empty, state.metadata)
        with keeping(no_store=nothing_is_kept(), ttl=shortest(self._ttl, kept_for()) or None):
            for name, tensor in state.tensors.items():
                self._view.store(self._key(state.chunk_id, name), "image", _rows(tensor))
        if self._store is not None:
            self._store.put(self._chunk(state))

    def load(self, chunk_id: str) -> FusionState | None:
        """The state of a chunk, whole or not at all: from the registry, else from the store."""
        with self._lock:
            layout = self._layouts.get(chunk_id)
        if layout is not None:
            tensors: dict[str, Array] = {}
            for name, empty in layout.tensors.items():
                block = self._view.lookup(self._key(chunk_id, name))
                if block is None:
                    break
                tensors[name] = np.asarray(block.embedding).reshape(empty.shape[1:])
            else:
                return FusionState(chunk_id, tensors, layout.metadata)
            if self._store is None:
                with self._lock:
                    self._layouts.pop(chunk_id, None)
        return self._restore(chunk_id)

    def inject(self, *, llm: Any, request_id: str, state: FusionState | None = None, chunk_id: str = "") -> Status:
        """Puts a state back into the model: the given one, or the one of the chunk.

        Returns the row of the status table: `hit`, `miss` (nothing kept, or the model did not take it) or `skip` (there
        is no provider).
        """
        if self.provider is None:
            return "skip"
        found = state if state is not None else self.load(chunk_id)
        if found is None:
            self._count("missed")
            return "miss"
        try:
            taken = self.provider.inject(llm=llm, request_id=request_id, state=found)
        except Exception:  # the model then runs its own fusion modules, as without a cache
            self._count("failed")
            return "miss"
        self._count("injected" if taken else "missed")
        return "hit" if taken else "miss"

    def remove(self, chunk_id: str) -> None:
        """Forgets a chunk's state."""
        with self._lock:
            layout = self._layouts.pop(chunk_id, None)
        for name in layout.tensors if layout is not None else ():
            self._view.remove(self._key(chunk_id, name), "image")
        if self._store is not None:
            self._store.delete(self._stored_id(chunk_id))

    def forget(self) -> None:
        """Forgets which states there are; those in the store are found again."""
        with self._lock:
            self._layouts.clear()

    def __len__(self) -> int:
        return len(self._layouts)

    def _restore(self, chunk_id: str) -> FusionState | None:
        chunk = self._store.get(self._stored_id(chunk_id)) if self._store is not None else None
        if chunk is None or chunk.meta.partition != self.partition or chunk.meta.epoch != self.epoch:
            return None
        data: Array = chunk.tensor.data.reshape(-1).view(np.uint8)
        tensors: dict[str, Array] = {}
        start = 0
        for entry in chunk.meta.metadata["tensors"]:
            dtype: np.dtype[Any] = np.dtype(str(entry["dtype"]))
            shape: list[int] = entry["shape"]
            if dtype.kind not in "fiub":
                return None
            stop = start + dtype.itemsize * math.prod(shape)
            tensors[str(entry["name"])] = data[start:stop].copy().view(dtype).reshape(shape)
            start = stop
        return FusionState(chunk_id, tensors, chunk.meta.metadata.get("metadata", {}))

    def _chunk(self, state: FusionState) -> Chunk:
        """One flat tensor of bytes; names, types and shapes stand beside it."""
        parts = [np.ascontiguousarray(tensor).reshape(-1).view(np.uint8) for tensor in state.tensors.values()]
        data = np.concatenate(parts)
        entries = [
            {"name": name, "dtype": tensor.dtype.str, "shape": list(tensor.shape)}
            for name, tensor in state.tensors.items()
        ]
        meta = ChunkMeta(
            id=self._stored_id(state.chunk_id),
            partition=self.partition,
            epoch=self.epoch,
            token_ids=(),
            prompt="",
            chunk="",
            kind="fusion",
            ttl=shortest(self._ttl, kept_for()),
            nbytes=int(data.nbytes),
            metadata={"tensors": entries, "metadata": dict(state.metadata), "chunk": state.chunk_id},
        )
        return Chunk(meta, Tensor(data, "U8"))

    def _stored_id(self, chunk_id: str) -> str:
        return digest_of("fusion", self.partition, self.epoch, chunk_id)[:40]

    def _key(self, chunk_id: str, name: str) -> str:
        return digest_of("fusion", chunk_id, name)

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


def _rows(tensor: Array) -> Array:
    """The registry holds `[rows, width]` and `[levels, rows, width]`: other shapes are folded, `load` unfolds them."""
    return tensor if tensor.ndim in (2, 3) else tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1)
