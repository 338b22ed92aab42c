"""What becomes findable, off the engine loop: chunks that a worker confirmed, and those of other processes on the folder."""

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from dejakv.cache import HierarchicalCache
from dejakv.store.base import ChunkMeta

log = logging.getLogger("dejakv.vllm")


class Indexing:
    """Keeps a cache's finder in step with a store that workers and other processes write to.

    refresh_s  how often others' chunks are looked for; 0: never
    """

    def __init__(self, cache: HierarchicalCache, refresh_s: float) -> None:
        self._cache = cache
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dejakv-index")
        self._last: Future[None] | None = None
        self._known: set[str] = {meta.id for meta in cache.store.metas()}
        cache.store.on_evict(self._known.discard)  # it may be stored, here or elsewhere, when it comes again
        self._stop = threading.Event()
        if refresh_s:
            threading.Thread(target=self._refresh, args=(refresh_s,), name="dejakv-refresh", daemon=True).start()

    def __contains__(self, id: str) -> bool:
        """Whether the chunk is stored, as far as is known here."""
        return id in self._known

    def stored(self, meta: ChunkMeta) -> None:
        """A worker confirmed that this chunk is in the store. Lookups that are submitted from now on find it."""
        self._last = self._pool.submit(self._add, meta)

    def drop(self, id: str) -> None:
        """Takes a chunk out of the store, since nobody is to find it."""
        self._pool.submit(self._cache.store.delete, id)

    @property
    def last(self) -> "Future[None] | None":
        """Done when everything that was confirmed so far can be found."""
        return self._last

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _add(self, meta: ChunkMeta) -> None:
        try:
            self._known.add(meta.id)
            self._cache.stored(meta)
            if self._cache.store.meta(meta.id) is None:  # evicted before it was confirmed
                self._known.discard(meta.id)
        except Exception:  # a chunk that cannot be found is a miss; later ones must be indexed nevertheless
            log.exception("a stored prompt cannot be found")

    def _refresh(self, seconds: float) -> None:
        store, mark = self._cache.store, None
        while not self._stop.wait(seconds):
            try:
                metas, mark = store.added(mark)
                for meta in metas:
                    if meta.id not in self._known:
                        self._add(meta)
            except Exception as error:  # a store that is out of reach is a store without news
                log.debug("other processes' prompts cannot be looked for: %s", error)
