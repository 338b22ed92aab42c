"""Lookups of vLLM's requests, in threads.

The engine loop starts a lookup and asks again in each step until there is a result. The cache is
the same as for other engines, but without levels: exact prefixes and copied text are found without
an encoder.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from dejakv import tracing
from dejakv.cache import HierarchicalCache
from dejakv.decide.costs import ReuseCosts, RunningMedian
from dejakv.decide.plan import Decision
from dejakv.engines.base import ComputedRows, Prepared
from dejakv.engines.vllm.identity import AnonymousMedia, LoraAdapters, UnprovenAdapter, prepare
from dejakv.engines.vllm.messages import BlendedRows, TimedStep
from dejakv.engines.vllm.recurrent.boundaries import at_snapshot
from dejakv.engines.vllm.request import LookupResult, as_lookup_result
from dejakv.engines.vllm.settings import ConnectorSettings, RequestOptions
from dejakv.request import Retention, retention_scope
from dejakv.store.base import StateInfo
from dejakv.store.budgets import now

MIN_STEP_TOKENS = 256
"""Fewest tokens of a step to measure.

A GPU takes about as long for fewer tokens, since it reads all weights either way."""

MIN_REQUEST_TOKENS = 8
"""Fewest tokens of such a step for each of its requests.

In a step in which most requests decode, reading their states takes the time."""


@dataclass
class RowPace:
    """Measures the seconds of a row, over the steps of vLLM's scheduler.

    Steps are noted in the engine loop. Any thread may read `costs`.
    """

    clock: Callable[[], float] = time.monotonic
    _row_rate: RunningMedian | None = None
    _last_end: float = 0.0

    @property
    def costs(self) -> ReuseCosts | None:
        """Seconds of a row, the median of the latest steps, as costs; None before any."""
        return None if self._row_rate is None else ReuseCosts(row=self._row_rate.value)

    def begin_step(self, output: Any, *, alone: bool) -> TimedStep | None:
        """Begin to measure a step, if its time tells the seconds of a row.

        Parameters
        ----------
        output : SchedulerOutput
            The step as vLLM's scheduler has planned it.
        alone : bool
            Whether the worker does no other long work in the step.

        Returns
        -------
        TimedStep or None
            None if the step is not to be measured.
        """
        tokens, requests = output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
        # Encoders, decoding and the worker's other work take time that is not that of rows.
        if (
            not alone
            or output.scheduled_encoder_inputs
            or tokens < max(MIN_STEP_TOKENS, MIN_REQUEST_TOKENS * requests)
        ):
            return None

        return TimedStep(self.clock(), tokens)

    def end_step(self, step: TimedStep | None) -> None:
        """Note the end of a step from `begin_step`, or of a step that was not measured (None)."""
        now = self.clock()

        # Asynchronous scheduling plans a step while the one before it runs.
        if step is not None:
            self.add_step((now - max(step.plan_time, self._last_end)) / step.tokens)

        self._last_end = now

    def add_step(self, row_seconds: float) -> None:
        """Add a measured step, in seconds per row."""
        if self._row_rate is None:
            self._row_rate = RunningMedian(row_seconds)
        else:
            self._row_rate.add(row_seconds)


log = logging.getLogger("dejakv.vllm")


class StoreIndexing:
    """Keeps a cache's finder in step with a store to which workers and other processes write.

    Parameters
    ----------
    cache : HierarchicalCache
        The cache with its store and its finder.
    refresh_s : float
        Seconds between searches for other processes' states; 0 for none.

    Attributes
    ----------
    last_indexing : Future[None] or None
        Done when all states confirmed so far can be found; None before the first.
    """

    def __init__(self, cache: HierarchicalCache, refresh_s: float) -> None:
        self._cache = cache
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dejakv-index")
        self.last_indexing: Future[None] | None = None

        self._indexed_ids: set[str] = {meta.id for meta in cache.store.metas()}
        # An evicted prompt may be stored again, here or elsewhere, when it comes again.
        cache.store.listen(removed=self._indexed_ids.discard)

        self._stop = threading.Event()

        # A daemon: a store out of reach must not keep the process from ending.
        if refresh_s:
            threading.Thread(
                target=self._refresh, args=(refresh_s,), name="dejakv-refresh", daemon=True
            ).start()

    def __contains__(self, id: str) -> bool:
        """Tell whether the state is stored, as far as is known here."""
        return id in self._indexed_ids

    def stored(self, meta: StateInfo) -> None:
        """Index a state that a worker has stored, for lookups submitted from now on."""
        # At once: the same prompt must not be stored again before the thread gets to it.
        self._indexed_ids.add(meta.id)
        self.last_indexing = self._pool.submit(self._add, meta)

    def drop(self, id: str) -> None:
        """Remove a state from the store, in the thread."""
        self._pool.submit(self._cache.store.delete, id)

    def close(self) -> None:
        """End the threads."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _add(self, meta: StateInfo) -> None:
        # A prompt that cannot be found is a miss; later ones must be indexed nevertheless.
        try:
            # First, so that an eviction during the next call can take it out again.
            self._indexed_ids.add(meta.id)
            # False for a state that was evicted before it was confirmed.
            if not self._cache.finder.add(meta):
                self._indexed_ids.discard(meta.id)
        except Exception:
            log.exception("a stored prompt cannot be found")

    def _refresh(self, seconds: float) -> None:
        store, mark = self._cache.store, None
        while not self._stop.wait(seconds):
            try:
                metas, mark = store.metas_since(mark)
                for meta in metas:
                    if meta.id not in self._indexed_ids:
                        self._add(meta)
            except Exception as error:
                # A store that is out of reach is a store without news.
                log.debug("other processes' prompts cannot be looked for: %s", error)


class LookupRunner:
    """Runs the lookups of one server.

    Parameters
    ----------
    state_tokens : int
        Tokens of a block of a model with recurrent layers; 0 for another model.

    Attributes
    ----------
    index : StoreIndexing
        What can be found.
    adapters : LoraAdapters
        Gives the epoch of a request, with a LoRA adapter or without.
    pace : RowPace
        Seconds of a row, as the scheduler side measures them.
    """

    def __init__(
        self,
        cache: HierarchicalCache,
        settings: ConnectorSettings,
        adapters: LoraAdapters,
        state_tokens: int = 0,
    ) -> None:
        self.cache = cache
        self._state_tokens = state_tokens
        self.index = StoreIndexing(cache, settings.refresh_s if settings.store else 0)
        self.adapters = adapters
        self.pace = RowPace()
        self._settings = settings
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="dejakv-lookup")

    def submit(self, request: Any, options: RequestOptions) -> "Future[LookupResult]":
        """Start a lookup.

        The result is never an exception: an error is a miss with its reason.
        """
        trace, indexed = tracing.hand_over(), self.index.last_indexing
        return self._pool.submit(self._look, request, options, indexed, trace)

    def rows_of(self, meta: StateInfo, blended_rows: BlendedRows) -> list[StateInfo]:
        """Describe a blended prompt's new text for the store.

        Parameters
        ----------
        meta : StateInfo
            Description of the prompt's exact state.
        blended_rows : BlendedRows
            Runs of new text in the prompt.
        """
        rows = ComputedRows(
            blended_rows.runs,
            blended_rows.donors,
            blended_rows.blend_depth,
            lambda first, stop: None,
        )
        return self.cache.describe_rows(meta, rows, meta.ttl)

    def close(self) -> None:
        """End the threads and close the cache with its store."""
        # Lookups use the index and the cache, so they end first.
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.index.close()
        self.cache.close()

    def _look(
        self,
        request: Any,
        options: RequestOptions,
        indexed: "Future[None] | None",
        trace: tracing.Handover | None,
    ) -> LookupResult:
        began = time.perf_counter()
        try:
            # A request finds all states that were confirmed before it came.
            if indexed is not None:
                indexed.result()
            with retention_scope(Retention(options.no_store)), tracing.taken_over(trace):
                lookup_result = self._find(request, options)
        except (AnonymousMedia, UnprovenAdapter) as error:
            lookup_result = LookupResult(reason=str(error))
        except Exception as error:
            log.debug("a lookup failed", exc_info=True)
            lookup_result = LookupResult(reason=f"the lookup failed: {type(error).__name__}")
        return replace(lookup_result, seconds=time.perf_counter() - began)

    def _find(self, request: Any, options: RequestOptions) -> LookupResult:
        prepared = prepare(request, self.adapters.epoch_of(request.lora_request), options.ttl)
        reuse_request, no_blend = options.reuse_request(), ""

        # A medium's tokens look alike whatever it shows, so a token map could join two pictures.
        if reuse_request.mode == "blend" and prepared.spans:
            reuse_request = replace(reuse_request, mode="exact", named=())
            no_blend = "blend is for prompts without media"

        # With mode off, too: the key and what is to be saved come from it.
        decision = self.cache.find(prepared, replace(reuse_request, levels=False))
        lookup_result = (
            LookupResult(reason=options.problem or "mode is off")
            if options.mode == "off"
            else as_lookup_result(decision, no_blend)
        )

        keeps_answer = self._settings.generated_text == "keep" and not options.no_store
        behind = decision.entry
        if self._state_tokens:
            lookup_result = at_snapshot(
                lookup_result, prepared, decision, self.cache.store, self._state_tokens
            )
            behind = lookup_result.save or behind
            save = self._state_to_save(lookup_result, options)
        else:
            save = self._to_save(prepared, decision, options)

        return replace(
            self._placed(lookup_result),
            key=decision.key,
            save=save,
            save_behind=behind if keeps_answer else None,
        )

    def _placed(self, lookup_result: LookupResult) -> LookupResult:
        """Add the estimated seconds for reading the result's state."""
        read_seconds = sum(
            self.cache.store.remote_read_seconds(id, [(0, lookup_result.tokens)])
            for id in lookup_result.donors
        )
        fallback = lookup_result.fallback
        return replace(
            lookup_result,
            read_seconds=read_seconds,
            fallback=None if fallback is None else self._placed(fallback),
        )

    def _state_to_save(
        self, lookup_result: LookupResult, options: RequestOptions
    ) -> StateInfo | None:
        """Return what is to be stored of a prompt of a model with recurrent layers."""
        entry = lookup_result.save
        if options.no_store or entry is None:
            return None
        new_tokens = entry.num_tokens - lookup_result.exact.tokens
        return (
            replace(entry, created=now()) if new_tokens >= self._settings.min_new_tokens else None
        )

    def _to_save(
        self, prepared: Prepared, decision: Decision, options: RequestOptions
    ) -> StateInfo | None:
        settings = self._settings
        tokens = len(prepared.token_ids)

        # The last token is computed in any case, so a hit reuses one token less than is stored.
        covered = decision.exact.reused + 1 if decision.exact.donors else 0

        if (
            options.no_store
            or tokens - covered < settings.min_new_tokens
            or decision.key in self.index
        ):
            return None
        return replace(decision.entry, created=now())
