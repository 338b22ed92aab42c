"""Lookups for vLLM's requests, in threads: the engine loop asks, and asks again until there is an answer.

The cache is that of the other engines, without levels: what is exact and what is copied text is found without an encoder.
"""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from dejakv.cache import HierarchicalCache
from dejakv.decide.plan import Decision
from dejakv.engines.base import ComputedRows, Prepared
from dejakv.engines.vllm.adapters import Adapters, UnprovenAdapter
from dejakv.engines.vllm.found import LookupResult, told
from dejakv.engines.vllm.indexing import Indexing
from dejakv.engines.vllm.keys import AnonymousMedia, prepare
from dejakv.engines.vllm.messages import Kept
from dejakv.engines.vllm.pace import Pace
from dejakv.engines.vllm.settings import ConnectorSettings, Wish
from dejakv.request import Request, keeping
from dejakv.store.base import ChunkMeta

log = logging.getLogger("dejakv.vllm")


class Lookups:
    """The lookups of one server.

    adapters  the epoch of a request's LoRA adapter, or of the base model
    pace      what a row takes, as the scheduler side sees it
    """

    def __init__(self, cache: HierarchicalCache, settings: ConnectorSettings, adapters: Adapters) -> None:
        self.cache = cache
        self.index = Indexing(cache, settings.refresh_s if settings.store_dir else 0)
        self.adapters = adapters
        self.pace = Pace()
        self._settings = settings
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="dejakv-lookup")

    def submit(self, request: Any, wish: Wish) -> "Future[LookupResult]":
        """Starts a lookup. Its result is never an exception: an error is a miss with its reason."""
        return self._pool.submit(self._look, request, wish, self.index.last)

    def rows_of(self, meta: ChunkMeta, kept: Kept) -> list[ChunkMeta]:
        """How the new text of a blended prompt would be stored, whose exact state would be stored as `meta`."""
        request = Request(meta.metadata["request"], "", "", partition=meta.partition, ttl=meta.ttl or None)
        rows = ComputedRows(kept.runs, kept.donors, kept.generation, lambda first, stop: None)
        return self.cache.describe_rows(Prepared(request, meta.token_ids, epoch=meta.epoch), meta.id, rows)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.index.close()
        self.cache.close()

    def _look(self, request: Any, wish: Wish, indexed: "Future[None] | None") -> LookupResult:
        began = time.perf_counter()
        try:
            if indexed is not None:
                indexed.result()
            with keeping(no_store=wish.no_store):
                found = self._find(request, wish)
        except (AnonymousMedia, UnprovenAdapter) as error:
            found = LookupResult(reason=str(error))
        except Exception as error:
            log.debug("a lookup failed", exc_info=True)
            found = LookupResult(reason=f"the lookup failed: {type(error).__name__}")
        return replace(found, seconds=time.perf_counter() - began)

    def _find(self, request: Any, wish: Wish) -> LookupResult:
        prepared = prepare(request, "", self.adapters.epoch_of(request.lora_request), wish.ttl)
        ask, instead = wish.ask(), ""
        if ask.mode == "blend" and prepared.spans:
            ask, instead = replace(ask, mode="exact", named=()), "blend is for prompts without media"
        decision = self.cache.find(prepared, replace(ask, levels=False))
        found = LookupResult(reason=wish.problem or "mode is off") if wish.mode == "off" else told(decision, instead)
        return replace(found, key=decision.key, save=self._to_save(prepared, decision, wish))

    def _to_save(self, prepared: Prepared, decision: Decision, wish: Wish) -> ChunkMeta | None:
        settings = self._settings
        tokens = len(prepared.token_ids)
        covered = decision.exact.reused + 1 if decision.exact.donors else 0
        if (
            wish.no_store
            or wish.problem
            or tokens < settings.min_tokens
            or (settings.max_tokens and tokens > settings.max_tokens)
            or tokens - covered < settings.min_new_tokens
            or decision.key in self.index
        ):
            return None
        return self.cache.describe(prepared, decision)
