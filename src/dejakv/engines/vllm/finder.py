"""Finding a donor for a vLLM request, in threads: the engine loop asks, and asks again until there is an answer."""

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
from dejakv.identity import digest_of
from dejakv.levels.base import Query, Status
from dejakv.lookup import Lookup
from dejakv.planner import plan
from dejakv.request import Request
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


class ConnectorCache(HierarchicalCache):
    """The cache of the other engines over a store that other processes write to: chunks are indexed when a worker says
    that they are stored, and media are told apart by digests that a vLLM request brings instead of bytes."""

    def space(self, request: Request, epoch: str) -> str:
        return digest_of("space", request.partition, epoch, str(request.metadata.get("media_key", "")))[:40]

    def index(self, meta: ChunkMeta) -> None:
        """Makes a stored chunk findable."""
        self._index(meta)

    def vectors_of(self, lookup: Lookup) -> dict[str, Any]:
        """Text and latent vectors, so that a restart embeds nothing again."""
        return dict(self._vectors(lookup.query))

    def _find(self, query: Query, key: str, epoch: str, statuses: dict[str, Status]) -> Any:
        if query.request.metadata["exact_only"]:
            return None, (), []
        return super()._find(query, key, epoch, statuses)


class Finder:
    """Looks donors up for one server.

    adapters  the epoch of a request's LoRA adapter, or of the base model
    text_of   a prompt's token ids as text, for the levels that compare text; None: only exact lookups
    """

    def __init__(
        self,
        cache: ConnectorCache,
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
        self.cache.index(meta)

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
        epoch = self.adapters.epoch_of(request.lora_request)
        blending = wish.mode == "blend" and self._text_of is not None
        text = self._text_of(request.prompt_token_ids) if self._text_of is not None else ""
        prepared = prepare(request, text, blending=blending)
        lookup = self.cache.lookup(prepared, epoch)
        if wish.donor is not None:
            found = self._named(prepared, lookup, wish, epoch)
        else:
            found = self._best(prepared, lookup, wish)
        return replace(found, key=lookup.key, save=self._to_save(prepared, lookup, epoch, wish))

    def _best(self, prepared: Prepared, lookup: Lookup, wish: Wish) -> Found:
        if wish.mode == "off":
            return Found(reason=wish.problem or "mode is off")
        asked = "blend" if wish.mode == "blend" else "exact"
        same = bool(lookup.donors) and lookup.donors[0].id == lookup.key
        match, donors, refused = lookup.match, lookup.donors, ""
        if asked == "blend" and not same and self.cache.promotions.due(lookup.key):
            match, donors, refused = None, (), "promoted: served approximately before, exact from now on"
        elif match is not None and not same and wish.threshold is not None and match.score < wish.threshold:
            match, donors, refused = None, (), f"score {match.score:.3f} is below the request's {wish.threshold:g}"
        elif match is None and lookup.verdicts:
            refused = f"{lookup.verdicts[-1].guard}: {lookup.verdicts[-1].reason}"
        if asked == "blend" and match is not None and not same and prepared.spans:
            match, donors, refused = None, (), "blend is for prompts without media"
        chosen = plan(
            len(prepared.token_ids),
            lookup.prefix,
            match,
            donors,
            same=same,
            asked=asked,
            min_gain=self._settings.min_gain,
            share=self.cache.config.blend.share,
            refused=refused,
        )
        exact = self._exact(lookup, chosen.reason)
        if chosen.method != "blend":
            return exact
        assert chosen.match is not None
        donor, match = chosen.donors[0].id, chosen.match
        instead = exact if exact.donor else None
        return Found("blend", donor, len(prepared.token_ids), match.level, match.score, instead=instead)

    @staticmethod
    def _exact(lookup: Lookup, reason: str) -> Found:
        if lookup.prefix is None:
            return Found(reason=reason or "no stored chunk begins like this prompt")
        hit, meta = lookup.prefix
        level = "exact_text" if meta.id == lookup.key else "prefix"
        return Found("exact", meta.id, hit.tokens, level, 1.0, reason if level == "prefix" else "")

    def _named(self, prepared: Prepared, lookup: Lookup, wish: Wish, epoch: str) -> Found:
        """A donor that the client named: untrusted, so it must be of the caller's own partition and epoch."""
        meta = self.cache.store.meta(wish.donor or "")
        if meta is None or meta.partition != prepared.request.partition or meta.epoch != epoch:
            return Found(reason="the donor that the request names is not known in its partition")
        if meta.id == lookup.key or wish.mode != "blend":
            exact = self._best(
                prepared, replace(lookup, match=None, donors=()), replace(wish, mode="exact", donor=None)
            )
            return (
                exact
                if exact.donor
                else replace(exact, reason="the named donor is not exact, and blend was not asked for")
            )
        if prepared.spans or meta.spans:
            return Found(reason="blend is for prompts without media")
        if self.cache.promotions.due(lookup.key):
            return Found(reason="promoted: served approximately before, exact from now on")
        instead = self._exact(lookup, "")
        tokens = len(prepared.token_ids)
        return Found("blend", meta.id, tokens, "named", None, instead=instead if instead.donor else None)

    def _to_save(self, prepared: Prepared, lookup: Lookup, epoch: str, wish: Wish) -> ChunkMeta | None:
        settings = self._settings
        tokens = len(prepared.token_ids)
        covered = lookup.prefix[0].tokens + 1 if lookup.prefix else 0
        if (
            wish.no_store
            or wish.problem
            or tokens < settings.min_tokens
            or (settings.max_tokens and tokens > settings.max_tokens)
            or tokens - covered < settings.min_new_tokens
            or lookup.key in self._known
        ):
            return None
        return ChunkMeta(
            id=lookup.key,
            partition=prepared.request.partition,
            epoch=epoch,
            token_ids=prepared.token_ids,
            prompt=prepared.request.prompt,
            chunk=prepared.request.chunk,
            space=lookup.query.space,
            spans=prepared.spans,
            embedder=self.cache.embedder,
            vectors=self.cache.vectors_of(lookup),
            created=time.time(),
        )

    def _refresh(self) -> None:
        """Other processes write to the same folder: what they stored is found here a few seconds later."""
        while not self._stop.wait(self._settings.refresh_s):
            try:
                for meta in self.cache.store.metas():
                    if meta.id not in self._known:
                        self.stored(meta)
            except Exception:  # a store that is out of reach is a store without news
                continue
