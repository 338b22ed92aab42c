"""Lookups for vLLM's requests, in threads: the engine loop asks, and asks again until there is an answer.

The cache is that of the other engines, without levels: what is exact and what is copied text is found without an encoder.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from dejakv.cache import HierarchicalCache
from dejakv.decide.costs import ReuseCosts, RunningMedian
from dejakv.decide.plan import Decision
from dejakv.engines.base import ComputedRows, Prepared
from dejakv.engines.vllm.identity import AnonymousMedia, LoraAdapters, UnprovenAdapter, prepare
from dejakv.engines.vllm.messages import BlendedRows, TimedStep
from dejakv.engines.vllm.request import LookupResult, told
from dejakv.engines.vllm.settings import ConnectorSettings, RequestOptions
from dejakv.request import keeping
from dejakv.store.base import ChunkMeta
from dejakv.store.budgets import now

LEAST_TOKENS = 256
"""Fewest tokens of a step to measure. A GPU takes about as long for fewer: it reads all weights either way."""

LEAST_EACH = 8
"""Fewest tokens of such a step for each of its requests: where most of them decode, their states take the time."""


@dataclass
class RowPace:
    """Measures the seconds of a row. Planned and heard in the engine loop; any thread may ask for `costs`."""

    clock: Callable[[], float] = time.monotonic
    _row: RunningMedian | None = None
    _last: float = 0.0

    @property
    def costs(self) -> ReuseCosts | None:
        """A row's seconds, the median of the latest steps, and nothing else; None before the first such step."""
        return None if self._row is None else ReuseCosts(row=self._row.value)

    def planned(self, output: Any, *, alone: bool) -> TimedStep | None:
        """Note a step of vLLM's scheduler if its time will tell the seconds of a row; None otherwise. `alone`: the worker does no other
        long work."""
        tokens, requests = output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
        # Such steps take time that is not their rows'.
        if not alone or output.scheduled_encoder_inputs or tokens < max(LEAST_TOKENS, LEAST_EACH * requests):
            return None
        return TimedStep(self.clock(), tokens)

    def over(self, step: TimedStep | None) -> None:
        """Note the end of a step from `planned`, or of another one (None)."""
        now = self.clock()
        if step is not None:  # asynchronous scheduling plans a step while the one before it runs
            self.seen((now - max(step.planned, self._last)) / step.tokens)
        self._last = now

    def seen(self, row_seconds: float) -> None:
        """Add a measured step, in seconds per row."""
        if self._row is None:
            self._row = RunningMedian(row_seconds)
        else:
            self._row.add(row_seconds)


log = logging.getLogger("dejakv.vllm")


class StoreIndexing:
    """Keeps a cache's finder in step with a store that workers and other processes write to.

    refresh_s  seconds between searches for others' chunks; 0: never
    last       done when everything confirmed so far can be found; None: it can
    """

    def __init__(self, cache: HierarchicalCache, refresh_s: float) -> None:
        self._cache = cache
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dejakv-index")
        self.last: Future[None] | None = None
        self._known: set[str] = {meta.id for meta in cache.store.metas()}
        cache.store.on_evict(self._known.discard)  # it may be stored, here or elsewhere, when it comes again
        self._stop = threading.Event()
        if refresh_s:
            threading.Thread(target=self._refresh, args=(refresh_s,), name="dejakv-refresh", daemon=True).start()

    def __contains__(self, id: str) -> bool:
        """Whether the chunk is stored, as far as is known here."""
        return id in self._known

    def stored(self, meta: ChunkMeta) -> None:
        """Make a chunk findable that a worker has stored: by lookups submitted from now on."""
        # At once: the same prompt must not be stored again before the thread gets to it.
        self._known.add(meta.id)
        self.last = self._pool.submit(self._add, meta)

    def drop(self, id: str) -> None:
        """Remove a chunk from the store."""
        self._pool.submit(self._cache.store.delete, id)

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _add(self, meta: ChunkMeta) -> None:
        try:
            # First, so that an eviction during the next call can take it out again.
            self._known.add(meta.id)
            if not self._cache.finder.add(meta):  # evicted before it was confirmed
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


class LookupRunner:
    """The lookups of one server.

    adapters  the epoch of a request's LoRA adapter, or of the base model
    pace      what a row takes, as the scheduler side sees it
    """

    def __init__(self, cache: HierarchicalCache, settings: ConnectorSettings, adapters: LoraAdapters) -> None:
        self.cache = cache
        self.index = StoreIndexing(cache, settings.refresh_s if settings.store else 0)
        self.adapters = adapters
        self.pace = RowPace()
        self._settings = settings
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="dejakv-lookup")

    def submit(self, request: Any, options: RequestOptions) -> "Future[LookupResult]":
        """Start a lookup. Its result is never an exception: an error is a miss with its reason."""
        return self._pool.submit(self._look, request, options, self.index.last)

    def rows_of(self, meta: ChunkMeta, blended_rows: BlendedRows) -> list[ChunkMeta]:
        """Descriptions of a blended prompt's new text; `meta`: that of its exact state."""
        rows = ComputedRows(blended_rows.runs, blended_rows.donors, blended_rows.generation, lambda first, stop: None)
        return self.cache.describe_rows(meta, rows, meta.ttl)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.index.close()
        self.cache.close()

    def _look(self, request: Any, options: RequestOptions, indexed: "Future[None] | None") -> LookupResult:
        began = time.perf_counter()
        try:
            # A request finds all that was confirmed before it came.
            if indexed is not None:
                indexed.result()
            with keeping(no_store=options.no_store):
                lookup_result = self._find(request, options)
        except (AnonymousMedia, UnprovenAdapter) as error:
            lookup_result = LookupResult(reason=str(error))
        except Exception as error:
            log.debug("a lookup failed", exc_info=True)
            lookup_result = LookupResult(reason=f"the lookup failed: {type(error).__name__}")
        return replace(lookup_result, seconds=time.perf_counter() - began)

    def _find(self, request: Any, options: RequestOptions) -> LookupResult:
        prepared = prepare(request, self.adapters.epoch_of(request.lora_request), options.ttl)
        reuse_request, no_blend = options.ask(), ""
        if reuse_request.mode == "blend" and prepared.spans:
            reuse_request, no_blend = (
                replace(reuse_request, mode="exact", named=()),
                "blend is for prompts without media",
            )
        # With mode off, too: the key and what is to be saved come from it.
        decision = self.cache.find(prepared, replace(reuse_request, levels=False))
        lookup_result = (
            LookupResult(reason=options.problem or "mode is off") if options.mode == "off" else told(decision, no_blend)
        )
        lookup_result = self._placed(lookup_result)
        return replace(lookup_result, key=decision.key, save=self._to_save(prepared, decision, options))

    def _placed(self, lookup_result: LookupResult) -> LookupResult:
        """Add the seconds for reading its state."""
        read_seconds, fallback = (
            sum(self.cache.store.away(id, [(0, lookup_result.tokens)]) for id in lookup_result.donors),
            lookup_result.instead,
        )
        return replace(lookup_result, away=read_seconds, instead=None if fallback is None else self._placed(fallback))

    def _to_save(self, prepared: Prepared, decision: Decision, options: RequestOptions) -> ChunkMeta | None:
        settings = self._settings
        tokens = len(prepared.token_ids)
        # The last token is computed in any case, so a hit reuses one token less than is stored.
        covered = decision.exact.reused + 1 if decision.exact.donors else 0
        if options.no_store or tokens - covered < settings.min_new_tokens or decision.key in self.index:
            return None
        return replace(decision.entry, created=now())
