"""L1.5 by chunk: outputs of a fusion module (an image-text projector, a resampler), stored and put back.

A `FusionProvider` reads the tensors from a model and writes them back. A state is one named entry of a store, of kind "fusion",
under the store's budget, lifetime and purges.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from safetensors.numpy import load, save

from dejakv.decide.levels.base import Status
from dejakv.decide.plan import Decision, Observer, Plan
from dejakv.encoder_cache.arrays import describe, from_raw, is_array, is_finite, size_of, to_raw
from dejakv.errors import InputError
from dejakv.identity import digest_of
from dejakv.request import DEFAULT_PARTITION, Prepared, kept_for, nothing_is_kept
from dejakv.store.base import ChunkMeta, StoredState, Tensor
from dejakv.store.budgets import shortest
from dejakv.store.store import Store

logger = logging.getLogger(__name__)

KIND = "fusion"


@dataclass(frozen=True, eq=False)
class FusionState:
    """Tensors of one chunk by name ("fusion_output", "image_features", ...): numpy arrays or torch tensors of any shape.

    Loaded tensors are of the framework and dtype that they were captured in, on the CPU.
    """

    chunk_id: str
    tensors: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


class FusionProvider(Protocol):
    """Reads and writes the fusion tensors of a served model (`llm`)."""

    def capture(self, *, llm: Any, request_id: str, chunk_id: str) -> FusionState | None:
        """Read the fusion modules' outputs for this request; None if they did not run."""
        ...

    def inject(self, *, llm: Any, request_id: str, state: FusionState) -> bool:
        """Let the model use the state instead of its fusion modules; False if it cannot."""
        ...


class FusionCache:
    """Fusion states by chunk id, for one model and one partition. Thread-safe; an error of the provider is a miss.

    store  of the states (`open_store()`: memory; a folder survives a restart)
    epoch  fingerprint of the model (`engine.epoch`)
    ttl    seconds of use of a state, 0 without a limit
    """

    def __init__(
        self,
        provider: FusionProvider | None,
        store: Store,
        epoch: str,
        partition: str = DEFAULT_PARTITION,
        ttl: float = 0.0,
    ) -> None:
        self.provider = provider
        self.epoch = epoch
        self.partition = partition
        self._store = store
        self._ttl = ttl

    def capture(self, *, llm: Any, request_id: str, chunk_id: str) -> bool:
        """Read and store the model's fusion tensors after a run; False without tensors, after an error, or with `no_store`."""
        if self.provider is None or nothing_is_kept():
            return False
        try:
            state = self.provider.capture(llm=llm, request_id=request_id, chunk_id=chunk_id)
            return state is not None and bool(state.tensors) and self.save(state)
        except (
            Exception
        ) as error:  # a provider is foreign code, and the answer is there already: it costs this state alone
            logger.warning("fusion state not stored: %s", error, exc_info=logger.isEnabledFor(logging.DEBUG))
            return False

    def save(self, state: FusionState) -> bool:
        """Store a copy of a state; False if refused.

        Raises: InputError for anything but arrays, and for arrays without elements, or with NaN or infinity.
        """
        for name, tensor in state.tensors.items():
            if not is_array(tensor):
                raise InputError(
                    f"the fusion state's {name!r} is of {type(tensor).__name__} and is not kept: capture a numpy array or "
                    "a torch tensor"
                )
            if not size_of(tensor) or not is_finite(tensor):
                raise InputError(
                    f"the fusion state's {name!r} has no elements, or NaN or infinite values, and is not kept: check what the "
                    "provider captures"
                )

        # One safetensors file of bytes, itself a flat tensor of bytes; names and kinds stand beside it in their order.
        data = np.frombuffer(save({name: to_raw(tensor).data for name, tensor in state.tensors.items()}), np.uint8)
        meta = ChunkMeta(
            id=self._id(state.chunk_id), partition=self.partition, epoch=self.epoch, token_ids=(), prompt="", chunk="", kind=KIND,
            ttl=shortest(self._ttl, kept_for()),
            metadata={
                "arrays": {name: describe(tensor) for name, tensor in state.tensors.items()},
                "metadata": dict(state.metadata),
                "chunk": state.chunk_id,
            },
        )  # fmt: skip
        return self._store.put(StoredState(meta, Tensor(data, "U8")))

    def load(self, chunk_id: str, max_read_seconds: float | None = None) -> FusionState | None:
        """Return the state of a chunk, None if missing, or if it cannot be read `max_read_seconds` so many seconds."""
        id = self._id(chunk_id)
        # Known to come too late: it is not even begun.
        if max_read_seconds is not None and self._store.away(id) > max_read_seconds:
            return None
        chunk = self._store.get(id, None if max_read_seconds is None else time.monotonic() + max_read_seconds)
        if chunk is None:
            return None

        raw = load(chunk.tensor.data.tobytes())
        about = chunk.meta.metadata
        if "arrays" not in about:  # written by 0.2, which stored numpy arrays alone
            return FusionState(chunk_id, {name: raw[name] for name in about["names"]}, about["metadata"])
        try:
            arrays = {name: from_raw(Tensor(raw[name], "U8"), kind) for name, kind in about["arrays"].items()}
        except InputError:  # of a dtype that this version of torch lacks
            return None
        return FusionState(chunk_id, arrays, about["metadata"])

    def inject(
        self,
        *,
        llm: Any,
        request_id: str,
        state: FusionState | None = None,
        chunk_id: str = "",
        max_read_seconds: float | None = None,
    ) -> Status:
        """Put a state back into the model: the given one, or the chunk's (`max_read_seconds`: see `load`).

        Returns its status: `hit`, `miss` (none stored, or the model did not take it) or `skip` (no provider).
        """
        if self.provider is None:
            return "skip"
        fusion_state = state if state is not None else self.load(chunk_id, max_read_seconds)

        if fusion_state is None:
            return "miss"
        try:
            accepted = self.provider.inject(llm=llm, request_id=request_id, state=fusion_state)
        except Exception as error:  # the model then runs its own fusion modules, as without a cache
            logger.warning("fusion state not put back: %s", error, exc_info=logger.isEnabledFor(logging.DEBUG))
            return "miss"
        return "hit" if accepted else "miss"

    def _id(self, chunk_id: str) -> str:
        return digest_of(KIND, self.partition, self.epoch, chunk_id)[:40]


class FusionStates(Observer):
    """Puts the state of the plan's first donor back into the model, and stores the fusion modules' outputs. Thread-safe; an error
    of the provider is a miss.

    engine  with the model to read and write
    store   of the states; the cache purges it with its own, and closes it
    ttl     seconds of use of a state, 0 without a limit
    """

    def __init__(self, provider: FusionProvider, engine: Any, store: Store, ttl: float = 0.0) -> None:
        self._provider = provider
        self._engine = engine
        self.store = store
        self._ttl = ttl

    def decided(self, prepared: Prepared, decision: Decision) -> Decision:
        """Put the state back before a run; status `fusion` is a `miss` without a donor."""
        plan, row = decision.plan, "miss"
        if plan.match is not None and plan.donors:
            donor = plan.donors[0].id
            states, request = self._of(prepared), prepared.request.id
            row = states.inject(llm=self._engine, request_id=request, chunk_id=donor, max_read_seconds=plan.within)
        return replace(decision, statuses={**decision.statuses, "fusion": row})

    def answered(self, prepared: Prepared, decision: Decision, plan: Plan, ran: object) -> None:
        """Store the outputs after a run without a donor."""
        if plan.match is None:
            request = prepared.request.id
            self._of(prepared).capture(llm=self._engine, request_id=request, chunk_id=decision.key)

    def _of(self, prepared: Prepared) -> FusionCache:
        return FusionCache(self._provider, self.store, prepared.epoch, prepared.request.partition, self._ttl)
