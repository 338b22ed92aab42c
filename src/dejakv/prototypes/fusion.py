"""Level 1.5: outputs of a fusion module by prompt, stored and put back.

A fusion module is an image-text projector or a resampler. A `FusionProvider` reads the tensors from
a model and writes them back. A state is one named entry of a store, of kind "fusion", under the
store's budget, lifetime and purges.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from safetensors.numpy import load, save

from dejakv.config import SemanticCacheConfig
from dejakv.decide.levels.base import Status
from dejakv.decide.plan import Decision, Plan, StoringObserver
from dejakv.encoder_cache.arrays import describe, from_raw, is_array, is_finite, size_of, to_raw
from dejakv.errors import InputError
from dejakv.identity import digest_of
from dejakv.request import DEFAULT_PARTITION, Prepared, current_retention
from dejakv.settings import make_from_factory
from dejakv.store.base import RawTensor, StateInfo, StoredState
from dejakv.store.budgets import Budget, shortest_lifetime
from dejakv.store.open import open_store
from dejakv.store.store import Store

logger = logging.getLogger(__name__)

KIND = "fusion"


@dataclass(frozen=True, eq=False)
class FusionState:
    """Tensors of one stored prompt by name.

    Attributes
    ----------
    chunk_id : str
        Id of the stored prompt.
    tensors : Mapping[str, Any]
        Numpy arrays or torch tensors of any shape by name ("fusion_output", "image_features", ...).
        Loaded tensors are of the framework and dtype in which they were captured, on the CPU.
    metadata : Mapping[str, Any]
        Values of the provider that are stored with the tensors.
    """

    chunk_id: str
    tensors: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


class FusionProvider(Protocol):
    """Reader and writer of the fusion tensors of a served model (`llm`)."""

    def capture(self, *, llm: Any, request_id: str, chunk_id: str) -> FusionState | None:
        """Read the fusion modules' outputs for this request.

        Parameters
        ----------
        llm : Any
            Served model.
        request_id : str
            Id of the request.
        chunk_id : str
            Id under which the state is stored.

        Returns
        -------
        FusionState or None
            None if the modules did not run.
        """
        ...

    def inject(self, *, llm: Any, request_id: str, state: FusionState) -> bool:
        """Let the model use the state instead of its fusion modules.

        Parameters
        ----------
        llm : Any
            Served model.
        request_id : str
            Id of the request.
        state : FusionState
            State to put back.

        Returns
        -------
        bool
            False if the model cannot use it.
        """
        ...


class FusionCache:
    """Fusion states by the id of a stored prompt, for one model and one partition.

    Thread-safe. An error of the provider is a miss.

    Parameters
    ----------
    provider : FusionProvider, optional
        Reader and writer of the tensors. With None nothing is captured or put back.
    store : Store
        Store of the states. `open_store()` is in memory, and a folder survives a restart.
    epoch : str
        Fingerprint of the model (`engine.epoch`).
    partition : str
        Partition of the states.
    ttl : float
        Seconds of use of a state, 0 without a limit.
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
        """Read and store the model's fusion tensors after a run.

        Parameters
        ----------
        llm : Any
            Served model.
        request_id : str
            Id of the request.
        chunk_id : str
            Id under which the state is stored.

        Returns
        -------
        bool
            False without tensors, after an error, or with `no_store`.
        """
        if self.provider is None or current_retention().no_store:
            return False
        try:
            state = self.provider.capture(llm=llm, request_id=request_id, chunk_id=chunk_id)
            return state is not None and bool(state.tensors) and self.save(state)
        except Exception as error:
            # A provider is foreign code, and the answer exists: a failure costs this state alone.
            logger.warning(
                "fusion state not stored: %s", error, exc_info=logger.isEnabledFor(logging.DEBUG)
            )
            return False

    def save(self, state: FusionState) -> bool:
        """Store a copy of a state; False if the store refuses it.

        Parameters
        ----------
        state : FusionState
            State to store.

        Returns
        -------
        bool
            Whether the store took the state.

        Raises
        ------
        InputError
            For anything but arrays, and for arrays without elements, or with NaN or infinity.
        """
        for name, tensor in state.tensors.items():
            if not is_array(tensor):
                raise InputError(
                    f"the fusion state's {name!r} is of {type(tensor).__name__} "
                    "and is not kept: capture a numpy array or "
                    "a torch tensor"
                )
            if not size_of(tensor) or not is_finite(tensor):
                raise InputError(
                    f"the fusion state's {name!r} has no elements, or NaN or "
                    "infinite values, and is not kept: check what the "
                    "provider captures"
                )

        # One safetensors file of bytes, itself a flat tensor of bytes. Names and kinds stand
        # beside it in their order.
        data = np.frombuffer(
            save({name: to_raw(tensor).data for name, tensor in state.tensors.items()}), np.uint8
        )
        meta = StateInfo(
            id=self._id(state.chunk_id),
            partition=self.partition,
            epoch=self.epoch,
            token_ids=(),
            prompt="",
            chunk="",
            kind=KIND,
            ttl=shortest_lifetime(self._ttl, current_retention().ttl),
            metadata={
                "arrays": {name: describe(tensor) for name, tensor in state.tensors.items()},
                "metadata": dict(state.metadata),
                "chunk": state.chunk_id,
            },
        )
        return self._store.put(StoredState(meta, RawTensor(data, "U8")))

    def load(self, chunk_id: str, max_read_seconds: float | None = None) -> FusionState | None:
        """Return the fusion state of a stored prompt.

        Parameters
        ----------
        chunk_id : str
            Id of the stored prompt.
        max_read_seconds : float, optional
            Limit on the time of reading the state, in seconds. None sets no limit.

        Returns
        -------
        FusionState or None
            None if the prompt has no state, or if reading it would take more than
            `max_read_seconds`.
        """
        id = self._id(chunk_id)

        # Known to come too late: it is not even begun.
        if max_read_seconds is not None and self._store.remote_read_seconds(id) > max_read_seconds:
            return None

        stored_state = self._store.get(
            id, None if max_read_seconds is None else time.monotonic() + max_read_seconds
        )
        if stored_state is None:
            return None

        raw = load(stored_state.tensor.data.tobytes())
        about = stored_state.meta.metadata
        # Written by 0.2, which stored numpy arrays alone.
        if "arrays" not in about:
            return FusionState(
                chunk_id, {name: raw[name] for name in about["names"]}, about["metadata"]
            )
        try:
            arrays = {
                name: from_raw(RawTensor(raw[name], "U8"), kind)
                for name, kind in about["arrays"].items()
            }
        # Of a dtype that this version of torch lacks.
        except InputError:
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
        """Put a state back into the model.

        Parameters
        ----------
        llm : Any
            Served model.
        request_id : str
            Id of the request.
        state : FusionState, optional
            State to put back. With None it is that of `chunk_id`.
        chunk_id : str
            Id of the stored prompt, which is read only without a `state`.
        max_read_seconds : float, optional
            Limit on the time of reading it (see `load`).

        Returns
        -------
        Status
            `hit`, `miss` if no state is stored or the model did not take it, `skip` without a
            provider.
        """
        if self.provider is None:
            return "skip"
        fusion_state = state if state is not None else self.load(chunk_id, max_read_seconds)

        if fusion_state is None:
            return "miss"
        try:
            accepted = self.provider.inject(llm=llm, request_id=request_id, state=fusion_state)
        except Exception as error:
            # The model then runs its own fusion modules, as without a cache.
            logger.warning(
                "fusion state not put back: %s", error, exc_info=logger.isEnabledFor(logging.DEBUG)
            )
            return "miss"
        return "hit" if accepted else "miss"

    def _id(self, chunk_id: str) -> str:
        return digest_of(KIND, self.partition, self.epoch, chunk_id)[:40]


class FusionStates(StoringObserver):
    """Observer that puts the first donor's fusion state back and stores fusion modules' outputs.

    Thread-safe. An error of the provider is a miss.

    Parameters
    ----------
    provider : FusionProvider
        Reader and writer of the tensors.
    engine : Any
        Engine with the model to read and write.
    store : Store
        Store of the states. The cache purges it with its own, and closes it.
    ttl : float
        Seconds of use of a state, 0 without a limit.
    """

    def __init__(
        self, provider: FusionProvider, engine: Any, store: Store, ttl: float = 0.0
    ) -> None:
        self._provider = provider
        self._engine = engine
        self.store = store
        self._ttl = ttl

    def review_decision(self, prepared: Prepared, decision: Decision) -> Decision:
        """Put the state back before a run; status `fusion` is a `miss` without a donor."""
        plan, row = decision.plan, "miss"
        if plan.match is not None and plan.donors:
            donor = plan.donors[0].id

            states, request = self._of(prepared), prepared.request.id
            row = states.inject(
                llm=self._engine,
                request_id=request,
                chunk_id=donor,
                max_read_seconds=plan.max_read_seconds,
            )
        return replace(decision, statuses={**decision.statuses, "fusion": row})

    def observe_answer(
        self, prepared: Prepared, decision: Decision, plan: Plan, ran: object
    ) -> None:
        """Store the outputs after a run without a donor."""
        if plan.match is None:
            request = prepared.request.id
            self._of(prepared).capture(llm=self._engine, request_id=request, chunk_id=decision.key)

    def _of(self, prepared: Prepared) -> FusionCache:
        return FusionCache(
            self._provider, self.store, prepared.epoch, prepared.request.partition, self._ttl
        )


def build_fusion(config: SemanticCacheConfig, engine: Any) -> FusionStates:
    """Build the states of fusion modules, in a store of their own, for a config with a provider."""
    assert config.fusion_provider is not None
    provider = make_from_factory(
        config.fusion_provider, "fusion_provider (--fusion-provider)", ("capture", "inject")
    )

    if folder := config.fusion_states_dir:
        store = open_store(folder, feed=config.feed)
    else:
        max_bytes = max(1, config.encoder_bytes)
        store = Store(budget=Budget(max_bytes, partition_budgets=config.parts.scaled(max_bytes)))
    return FusionStates(provider, engine, store, config.lifetime(config.ttl_fusion))
