"""Lookups for vLLM's requests, in threads: the engine loop asks, and asks again until there is an answer.

The cache is that of the other engines, over a store that other processes write to: a chunk is made findable when a worker
says that it is stored.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from dejakv.cache import HierarchicalCache
from dejakv.engines.base import Prepared
from dejakv.engines.vllm.adapters import Adapters, UnprovenAdapter
from dejakv.engines.vllm.keys import AnonymousMedia, prepare
from dejakv.engines.vllm.settings import ConnectorSettings, Wish
from dejakv.find.decision import Decision
from dejakv.store.base import ChunkMeta


@dataclass(frozen=True)
class Found:
    """What a lookup says.

    method  `none`, `exact` (token for token, perhaps a prefix) or `blend`
    tokens  leading tokens of the prompt that the donor's state covers (for blend: all that is mapped)
    save    how the prompt's own state would be stored; None if it must not or need not be
    key     the prompt's exact key, empty where it could not be made
    instead of a blend: the exact prefix to take if the blend turns out not to be possible
    """

    method: str = "none"
    donor: str | None = None
    tokens: int = 0
    level: str = ""
    score: float | None = None
    reason: str = ""
    key: str = ""
    save: ChunkMeta | None = None
    seconds: float = 0.0
    instead: "Found | None" = None


class Lookups:
    """The lookups of one server.

    adapters  the epoch of a request's LoRA adapter, or of the base model
    text_of   a prompt's token ids as text, for the levels that compare text; None: only exact lookups
    """

    def __init__(
        self,
        cache: HierarchicalCache,
        settings: ConnectorSettings,
        adapters: Adapters,
        text_of: Callable[[tuple[int, ...]], str] | None = None,
    ) -> None:
        self.cache = cache
        self._settings = settings
        self.adapters = adapters
        self._text_of = text_of
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="dejakv-lookup")
        self._known: set[str] = {meta.id for meta in cache.store.metas()}
        cache.store.on_evict(self._known.discard)  # it may be stored, here or elsewhere, when it comes again
        self._stop = threading.Event()
        if settings.refresh_s and settings.store_dir:
            threading.Thread(target=self._refresh, name="dejakv-refresh", daemon=True).start()

    def submit(self, request: Any, wish: Wish) -> "Future[Found]":
        """Starts a lookup. The future never holds an exception: an error is a miss with its reason."""
        return self._pool.submit(self._find_safely, request, wish)

    def stored(self, meta: ChunkMeta) -> None:
        """A worker confirmed that this chunk is in the store."""
        self._known.add(meta.id)
        self.cache.finder.add(meta)

    def drop(self, meta: ChunkMeta) -> None:
        """Takes a chunk out of the store, in a thread, since nobody is to find it."""
        self._pool.submit(self.cache.store.delete, meta.id)

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.cache.close()

    def _find_safely(self, request: Any, wish: Wish) -> Found:
        began = time.perf_counter()
        try:
            found = self._find(request, wish)
        except (AnonymousMedia, UnprovenAdapter) as error:
            found = Found(reason=str(error))
        except Exception as error:
            found = Found(reason=f"the lookup failed: {type(error).__name__}: {error}")
        return replace(found, seconds=time.perf_counter() - began)

    def _find(self, request: Any, wish: Wish) -> Found:
        text = self._text_of(request.prompt_token_ids) if self._text_of is not None else ""
        prepared = prepare(request, text, self.adapters.epoch_of(request.lora_request))
        ask, instead = wish.ask(similar=wish.mode == "blend" and self._text_of is not None), ""
        if ask.mode == "blend" and prepared.spans:
            ask, instead = replace(ask, mode="exact", similar=False, donor=None), "blend is for prompts without media"
        decision = self.cache.find(prepared, ask)
        found = Found(reason=wish.problem or "mode is off") if wish.mode == "off" else _told(decision, instead)
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
            or decision.key in self._known
        ):
            return None
        return self.cache.describe(prepared, decision)

    def _refresh(self) -> None:
        """Other processes write to the same folder: what they stored is found here a few seconds later."""
        while not self._stop.wait(self._settings.refresh_s):
            try:
                for meta in self.cache.store.metas():
                    if meta.id not in self._known:
                        self.stored(meta)
            except Exception:  # a store that is out of reach is a store without news
                continue


def _told(decision: Decision, instead: str) -> Found:
    """The decision as the scheduler takes it. `instead`: why a blend that was asked for was not looked for."""
    chosen = decision.plan
    reason = instead or chosen.reason
    exact = Found(reason=reason or "no stored chunk begins like this prompt")
    if decision.found.prefix is not None:
        hit, meta = decision.found.prefix
        whole = meta.id == decision.key
        exact = Found("exact", meta.id, hit.tokens, "exact_text" if whole else "prefix", 1.0, "" if whole else reason)
    if chosen.method != "blend" or chosen.match is None:
        return exact
    return Found(
        "blend",
        chosen.donors[0].id,
        decision.tokens,
        chosen.match.level,
        chosen.match.score,
        instead=exact if exact.donor else None,
    )
