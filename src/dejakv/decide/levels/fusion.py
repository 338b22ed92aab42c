"""L1.5 by chunk: what a fusion module (an image-text projector, a resampler) put out for a chunk, kept and put back.

It is a view of the encoder registry: a state's tensors live there, under the registry's budget and eviction, keyed by the
chunk. A `FusionProvider` knows how to read them from a model and how to write them back. With a store they also survive
a restart, as chunks of kind "fusion".
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray
from safetensors.numpy import load, save

from dejakv.decide.levels.base import Status
from dejakv.decide.plan import Decision, Plan
from dejakv.identity import digest_of
from dejakv.request import DEFAULT_PARTITION, Prepared, keeping, kept_for, nothing_is_kept
from dejakv.store.age import shortest
from dejakv.store.base import Chunk, ChunkMeta, Tensor
from dejakv.store.selection import Purged, Selection
from dejakv.store.store import Store

if TYPE_CHECKING:
    from dejakv.encoder_cache import VisualKVCache

Array = NDArray[Any]
logger = logging.getLogger(__name__)

_MOST = 256
"""Partitions (times models) whose states are kept at hand; those of others are in the store, if there is one."""


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
        registry: "VisualKVCache",
        epoch: str,
        partition: str = DEFAULT_PARTITION,
        store: Store | None = None,
        ttl: float = 0.0,
    ) -> None:
        self.provider = provider
        self.epoch = epoch
        self.partition = partition
        self._view = registry.view(f"fusion:{epoch}", partition)
        self._store = store
        self._ttl = ttl
        self._layouts: dict[str, FusionState] = {}

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
            logger.debug("the fusion provider failed", exc_info=True)
            return False
        return True

    def save(self, state: FusionState) -> None:
        """Keeps a copy of a state, in the registry and, if there is one, in the store.

        Raises InputError, as the registry does, for tensors with NaN or without elements.
        """
        state = FusionState(state.chunk_id, {n: np.array(t) for n, t in state.tensors.items()}, state.metadata)
        empty = {name: np.empty((0, *tensor.shape), tensor.dtype) for name, tensor in state.tensors.items()}
        self._layouts[state.chunk_id] = FusionState(state.chunk_id, empty, state.metadata)
        with keeping(no_store=nothing_is_kept(), ttl=shortest(self._ttl, kept_for()) or None):
            for name, tensor in state.tensors.items():
                self._view.store(self._key(state.chunk_id, name), "image", _rows(tensor))
        if self._store is not None:
            self._store.put(self._chunk(state))

    def load(self, chunk_id: str) -> FusionState | None:
        """The state of a chunk, whole or not at all: from the registry, else from the store."""
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
            return "miss"
        try:
            taken = self.provider.inject(llm=llm, request_id=request_id, state=found)
        except Exception:  # the model then runs its own fusion modules, as without a cache
            logger.debug("the fusion provider failed", exc_info=True)
            return "miss"
        return "hit" if taken else "miss"

    def remove(self, chunk_id: str) -> None:
        """Forgets a chunk's state."""
        layout = self._layouts.pop(chunk_id, None)
        for name in layout.tensors if layout is not None else ():
            self._view.remove(self._key(chunk_id, name), "image")
        if self._store is not None:
            self._store.delete(self._stored_id(chunk_id))

    def forget(self) -> None:
        """Forgets which states there are; those in the store are found again."""
        self._layouts.clear()

    def __len__(self) -> int:
        return len(self._layouts)

    def _restore(self, chunk_id: str) -> FusionState | None:
        chunk = self._store.get(self._stored_id(chunk_id)) if self._store is not None else None
        if chunk is None or chunk.meta.partition != self.partition or chunk.meta.epoch != self.epoch:
            return None
        names: list[str] | None = chunk.meta.metadata.get("names")
        if names is None:
            return None
        tensors = load(np.ascontiguousarray(chunk.tensor.data).tobytes())
        return FusionState(chunk_id, {name: tensors[name] for name in names}, chunk.meta.metadata["metadata"])

    def _chunk(self, state: FusionState) -> Chunk:
        """A safetensors file as one flat tensor of bytes; the names stand beside it in their order."""
        data = np.frombuffer(save(dict(state.tensors)), np.uint8)
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
            metadata={"names": list(state.tensors), "metadata": dict(state.metadata), "chunk": state.chunk_id},
        )
        return Chunk(meta, Tensor(data, "U8"))

    def _stored_id(self, chunk_id: str) -> str:
        return digest_of("fusion", self.partition, self.epoch, chunk_id)[:40]

    def _key(self, chunk_id: str, name: str) -> str:
        return digest_of("fusion", chunk_id, name)


def _rows(tensor: Array) -> Array:
    """The registry holds `[rows, width]` and `[levels, rows, width]`: other shapes are folded, `load` unfolds them."""
    return tensor if tensor.ndim in (2, 3) else tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1)


class FusionStates:
    """An observer: puts the state of the plan's first donor back into the model, and keeps what the model's fusion modules put out.
    Thread-safe; an error of the provider is a miss.

    engine  whose model is read and written
    store   where states survive a restart; None keeps them in the registry alone
    ttl     seconds for which a state may be used, 0 without a limit
    """

    def __init__(
        self,
        provider: FusionProvider,
        engine: Any,
        registry: "VisualKVCache",
        store: Store | None = None,
        ttl: float = 0.0,
    ) -> None:
        self._provider = provider
        self._engine = engine
        self._registry = registry
        self._store = store
        self._ttl = ttl
        self._caches: LRUCache[tuple[str, str], FusionCache] = LRUCache(_MOST)
        self._lock = threading.Lock()

    def decided(self, prepared: Prepared, decision: Decision) -> Decision:
        """Before a run; the row `fusion` of the status table is a `miss` where no donor is used."""
        plan, row = decision.plan, "miss"
        if plan.match is not None and plan.donors:
            cache, donor = self._of(prepared), plan.donors[0].id
            row = cache.inject(llm=self._engine, request_id=prepared.request.id, chunk_id=donor)
        return replace(decision, statuses={**decision.statuses, "fusion": row})

    def answered(self, prepared: Prepared, decision: Decision, plan: Plan, ran: object) -> None:
        """After a run without a donor: keeps what there is to keep."""
        if plan.match is None:
            request = prepared.request.id
            self._of(prepared).capture(llm=self._engine, request_id=request, chunk_id=decision.key)

    def purge(self, selection: Selection, *, dry_run: bool = False) -> Purged:
        """Removes the states of the selected prompts (`donors`), or those that are selected otherwise; what was in the store. Tensors
        in the registry leave with its own purge. Raises: StoreError."""
        purged = self._store.purge(selection, dry_run=dry_run) if self._store is not None else Purged()
        with self._lock:
            found = [cache for (_, of), cache in list(self._caches.items()) if selection.partition in (None, of)]
        for cache in found if not dry_run else ():
            for id in selection.donors:
                cache.remove(id)
            if not selection.donors and selection.older_than is None:
                cache.forget()
        return purged

    def close(self) -> None:
        """Closes the store."""
        if self._store is not None:
            self._store.close()

    def _of(self, prepared: Prepared) -> FusionCache:
        key = (prepared.epoch, prepared.request.partition)
        with self._lock:
            found = self._caches.get(key)
            if found is None:
                found = FusionCache(self._provider, self._registry, *key, store=self._store, ttl=self._ttl)
                self._caches[key] = found
            return found
