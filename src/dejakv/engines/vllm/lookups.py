"""Lookups for vLLM's requests, in threads: the engine loop asks, and asks again until there is an answer.

The cache is that of the other engines. What is exact and what is copied text is found at once, without an encoder; only where that
is not enough are prompts compared as text, in a thread of its own, and neither an exact answer nor a save waits for it. A blend of
copied text waits for it only where that pays (`Finder.seeks_like`), and runs as it is if nothing comes of it.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dejakv.cache import HierarchicalCache
from dejakv.engines.base import ComputedRows, Prepared
from dejakv.engines.vllm.adapters import Adapters, UnprovenAdapter
from dejakv.engines.vllm.found import Found, told
from dejakv.engines.vllm.indexing import Indexing
from dejakv.engines.vllm.keys import AnonymousMedia, partition_of, prepare
from dejakv.engines.vllm.limits import Would
from dejakv.engines.vllm.messages import Kept
from dejakv.engines.vllm.pace import Pace
from dejakv.engines.vllm.settings import ConnectorSettings, Wish
from dejakv.engines.vllm.texts import Texts
from dejakv.find.ask import Ask
from dejakv.find.bound import BOUND, setting_of
from dejakv.find.decision import Decision
from dejakv.request import Request
from dejakv.retention import keeping
from dejakv.store.base import ChunkMeta

log = logging.getLogger("dejakv.vllm")


@dataclass
class Lookup:
    """One lookup, as far as it has come.

    answer     never holds an exception: an error is a miss with its reason
    early      what is exact or copied, while prompts are still compared as text
    described  how the prompt's state would be stored, with its text and vectors; None until that is known
    jobs       what threads do for it, or are to do
    over       nobody asks for any of it any more
    """

    answer: "Future[Found]" = field(default_factory=lambda: Future[Found]())
    early: Found | None = None
    described: ChunkMeta | None = None
    jobs: "list[Future[None]]" = field(default_factory=lambda: list[Future[None]]())
    over: bool = False

    def by_now(self, reason: str) -> Found:
        """What is known of it, and why no more."""
        return Found(reason=reason) if self.early is None else replace(self.early, reason=reason)

    def drop(self) -> None:
        """The request is over: what no thread has begun for it is not done, and others come sooner."""
        self.over = True
        for job in list(self.jobs):
            job.cancel()


class Lookups:
    """The lookups of one server.

    adapters  the epoch of a request's LoRA adapter, or of the base model
    text_of   a prompt's token ids as text, for the levels that compare text; None: there are none
    pace      what a row takes, as the scheduler side sees it
    """

    def __init__(
        self,
        cache: HierarchicalCache,
        settings: ConnectorSettings,
        adapters: Adapters,
        text_of: Callable[[tuple[int, ...]], str] | None = None,
    ) -> None:
        self.cache = cache
        self.index = Indexing(cache, settings.refresh_s if settings.store_dir else 0)
        self.adapters = adapters
        self.pace = Pace()
        self.texts = Texts()
        self._settings = settings
        self._text_of = text_of
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="dejakv-lookup")

    def submit(self, request: Any, wish: Wish) -> Lookup:
        """Starts a lookup."""
        lookup = Lookup()
        lookup.jobs.append(self._pool.submit(self._look_for, lookup, request, wish, self.index.last))
        return lookup

    def rows_of(self, meta: ChunkMeta, kept: Kept) -> list[ChunkMeta]:
        """How the new text of a blended prompt would be stored, whose exact state would be stored as `meta`."""
        request = Request(meta.metadata["request"], "", "", partition=meta.partition, ttl=meta.ttl or None)
        rows = ComputedRows(kept.runs, kept.donors, kept.generation, lambda first, stop: None)
        return self.cache.describe_rows(Prepared(request, meta.token_ids, epoch=meta.epoch), meta.id, rows)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.texts.close()
        self.index.close()
        self.cache.close()

    def _look_for(self, lookup: Lookup, request: Any, wish: Wish, indexed: "Future[None] | None") -> None:
        with keeping(no_store=wish.no_store):
            self._look(lookup, request, wish, indexed)

    def _look(self, lookup: Lookup, request: Any, wish: Wish, indexed: "Future[None] | None") -> None:
        began = time.perf_counter()
        try:
            if indexed is not None:
                indexed.result()
            prepared = prepare(request, "", self.adapters.epoch_of(request.lora_request), wish.ttl)
            if wish.apart:
                lookup.answer.set_result(self._apart(prepared, wish))
                return
            ask, instead = wish.ask(), ""
            if ask.mode == "blend" and prepared.spans:
                ask, instead = replace(ask, mode="exact", named=()), "blend is for prompts without media"
            decision = self.cache.find(prepared, replace(ask, levels=False))
            found = (
                Found(reason=wish.problem or "mode is off")
                if wish.mode == "off"
                else self._told(decision, prepared, wish, instead)
            )
            found = replace(found, key=decision.key, save=self._to_save(prepared, decision, wish))
        except (AnonymousMedia, UnprovenAdapter) as error:
            found = Found(reason=str(error))
        except Exception as error:
            log.debug("a lookup failed", exc_info=True)
            found = Found(reason=f"the lookup failed: {type(error).__name__}")
        else:
            if self._compare(lookup, found, prepared, ask, wish, decision, began):
                return
        lookup.answer.set_result(replace(found, seconds=time.perf_counter() - began))

    def _told(self, decision: Decision, prepared: Prepared, wish: Wish, instead: str = "") -> Found:
        """The decision, within the request's limit."""
        found = told(decision, instead)
        if wish.limit is None:
            return found
        would = Would.of(decision, prepared.epoch, setting_of("blend", self.cache.config))
        if would is None or would.within(wish.limit):
            return replace(found, would=would)
        held_back = f"{BOUND}: the limit of this request does not cover the blend"
        return replace(found.instead or Found(), key=decision.key, reason=held_back, would=would)

    def _apart(self, prepared: Prepared, wish: Wish) -> Found:
        """The prompt from the donors that are named, whatever is stored of it."""
        where = (partition_of(wish.apart), prepared.epoch)
        metas = map(self.cache.store.meta, wish.donors)
        if not all(meta is not None and (meta.partition, meta.epoch) == where for meta in metas):
            return Found(reason="a donor that the request names is not known in its partition")
        return Found("blend", wish.donors, len(prepared.token_ids), "named", 1.0)

    def _compare(
        self,
        lookup: Lookup,
        found: Found,
        prepared: Prepared,
        ask: Ask,
        wish: Wish,
        decision: Decision,
        began: float,
    ) -> bool:
        """Has the prompt compared and described as text, if there is anything to gain. True if the answer waits for it."""
        if self._text_of is None:
            return False
        similar = self._seeks_like(found, ask, decision)
        if not (similar or found.save):
            return False
        lookup.early = found
        as_text = partial(self._as_text, lookup, found, prepared, ask if similar else None, wish, decision, began)
        job = self.texts.submit(as_text)
        if job is None:
            return False
        lookup.jobs.append(job)
        if lookup.over:  # since before the job was there
            job.cancel()
        return similar

    def _seeks_like(self, found: Found, ask: Ask, decision: Decision) -> bool:
        """Whether the answer may wait for prompts that are only like this one.

        Beside copied text they must be worth it, and the encoder be at work for nobody else. A blend of a request with a limit stays
        as it is: one that is held back waits for nothing, and is labelled for those that are served.
        """
        if ask.mode != "blend" or ask.named or found.would is not None or found.level == "exact_text":
            return False
        if found.method != "blend":
            return True
        costs, finder = self.pace.costs, self.cache.finder
        if costs is None or not self.texts.idle:
            return False
        least = round((decision.tokens - decision.plan.kept) * self.cache.config.blend.share)
        if not finder.seeks_like(decision.found, decision.tokens, ask, costs, least):
            return False
        in_time = finder.likeness.seconds.value < self._settings.lookup_timeout_s
        if not in_time:
            finder.likeness.seconds.missed()
        return in_time

    def _as_text(
        self,
        lookup: Lookup,
        found: Found,
        prepared: Prepared,
        ask: Ask | None,
        wish: Wish,
        decision: Decision,
        began: float,
    ) -> None:
        """In the thread for text: `ask` finds similar prompts, None only describes this one."""
        assert self._text_of is not None
        try:
            text = self._text_of(prepared.token_ids)
            prepared = replace(prepared, request=replace(prepared.request, prompt=text, chunk=text))
            if ask is not None:
                decision = self.cache.finder.find_again(decision, prepared, ask)
                again, failed = self._told(decision, prepared, wish), decision.found.failed
                reason = again.reason or (failed and f"prompts could not be compared: {failed}")
                found = replace(again, key=found.key, save=found.save, reason=reason, failed=failed)
        except Exception as error:
            log.debug("prompts could not be compared", exc_info=True)
            kind = type(error).__name__
            found = replace(found, reason=f"prompts could not be compared: {kind}", failed=kind)
        if ask is not None:
            lookup.answer.set_result(replace(found, seconds=time.perf_counter() - began))
        if found.save is not None:
            query = replace(decision.query, request=prepared.request)
            lookup.described = self.cache.describe(prepared, replace(decision, query=query))

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
