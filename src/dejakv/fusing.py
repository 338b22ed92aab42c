"""L1.5 with a user's `FusionProvider`: its states by the chunks of prompts, around each run of the engine."""

import threading
from typing import Any

from cachetools import LRUCache

from dejakv.engines.base import Prepared
from dejakv.find.ways import Plan
from dejakv.levels.base import Status
from dejakv.levels.fusion import EncoderRegistry, FusionCache, FusionProvider
from dejakv.store.base import Store
from dejakv.store.purging import purge
from dejakv.store.selection import Purged, Selection

_MOST = 256
"""Partitions (times models) whose states are kept at hand; those of others are in the store, if there is one."""


class Fusing:
    """Fusion states of all partitions. Thread-safe; an error of the provider is a miss.

    store  where states survive a restart; None keeps them in the registry alone
    ttl    seconds for which a state may be used, 0 without a limit
    """

    def __init__(
        self, provider: FusionProvider, registry: EncoderRegistry, store: Store | None = None, ttl: float = 0.0
    ) -> None:
        self._provider = provider
        self._registry = registry
        self._store = store
        self._ttl = ttl
        self._caches: LRUCache[tuple[str, str], FusionCache] = LRUCache(_MOST)
        self._lock = threading.Lock()

    def inject(self, engine: Any, prepared: Prepared, plan: Plan) -> Status:
        """Before a run: puts the state of the plan's first donor back into the model. The row `fusion` of the status table;
        a `miss` where no donor is used."""
        if plan.match is None or not plan.donors:
            return "miss"
        return self._of(prepared).inject(llm=engine, request_id=prepared.request.id, chunk_id=plan.donors[0].id)

    def capture(self, engine: Any, prepared: Prepared, key: str, ran: Plan) -> bool:
        """After a run without a donor: keeps what the model's fusion modules put out. False if there is nothing to keep."""
        if ran.match is not None:
            return False
        return self._of(prepared).capture(llm=engine, request_id=prepared.request.id, chunk_id=key)

    def purge(self, selection: Selection, *, dry_run: bool = False) -> Purged:
        """Removes the states of the selected prompts (`donors`), or those that are selected otherwise; what was in the store. Tensors
        in the registry leave with its own purge. Raises: StoreError."""
        purged = purge(self._store, selection, dry_run=dry_run) if self._store is not None else Purged()
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
