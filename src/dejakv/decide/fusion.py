"""L1.5 with a user's `FusionProvider`: its states by the chunks of prompts, around each run of the engine."""

import threading
from dataclasses import replace
from typing import Any

from cachetools import LRUCache

from dejakv.decide.levels.fusion import EncoderRegistry, FusionCache, FusionProvider
from dejakv.decide.plan import Decision, Plan
from dejakv.request import Prepared
from dejakv.store.selection import Purged, Selection
from dejakv.store.store import Store

_MOST = 256
"""Partitions (times models) whose states are kept at hand; those of others are in the store, if there is one."""


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
        registry: EncoderRegistry,
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
