"""Find, judge, plan: for a request, the cheapest way to run it that its caller allows. Knows neither torch nor an engine.

decision = finder.decide(prepared, Ask("blend"))
decision.plan.method, decision.plan.donors, decision.plan.reason
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from dejakv.config import SemanticCacheConfig
from dejakv.decide.copied.fingerprints import RUN, overlap, with_media
from dejakv.decide.copied.search import CopiedText, fingerprints_of
from dejakv.decide.costs import ReuseCosts
from dejakv.decide.counts import PartitionCounts
from dejakv.decide.guards.base import Guard, Verdict, judge
from dejakv.decide.guards.lexical import QUESTION
from dejakv.decide.levels.base import Level, Match, Query, Status, Vectors
from dejakv.decide.levels.exact import ExactTextCache
from dejakv.decide.plan import COPIED, FULL, Decision, DonorSearch, Method, ReuseRequest, choose, serves_blends, settled
from dejakv.errors import ConfigError
from dejakv.identity import digest_of, exact_key, media_key
from dejakv.request import Prepared, Request
from dejakv.store.base import KV, ChunkMeta, PrefixHit
from dejakv.store.budgets import shortest
from dejakv.store.forks import fork_safe_rlock
from dejakv.store.store import Store

logger = logging.getLogger(__name__)

Embed = Callable[[Request], Vectors]
FILLED_AT_ONCE = 64
"""Stored chunks for one call of indexing copied text: six times as fast as one by one."""

NAMED = "named"
"""Level of a donor that the caller named."""

LEAST_COPIED = 0.25
"""Share of a prompt that donors must hold. With less a blend saves hardly more than it costs, and the prompt's exact state is of
more use. From .1 to .4 the tokens computed change by 5% at most (docs/results/generations.md)."""

PAIR = 2
"""Tokens of the shortest run in estimates of `top_layer`, which takes any token together with a neighbour."""


def no_vectors(_: Request) -> Vectors:
    return {}


@dataclass(frozen=True)
class EpochPrefixes:
    """Stored prefixes of one epoch, as `part_order.Prefixes`."""

    store: Store
    epoch: str

    def held(self, token_ids: Sequence[int], partition: str) -> int:
        """Number of leading tokens stored in the partition."""
        prefix_hit = self.store.find(partition, self.epoch, token_ids)
        return prefix_hit[0].tokens if prefix_hit is not None else 0


class DonorFinder:
    """Levels, guards and plans over one store. Thread-safe; partitions and epochs never see each other.

    Levels and the index of copied text run under its lock; encoders and guards without it.

    levels       asked in order; the first with an accepted donor wins
    guards       judge every donor that is not exact
    embed        computes the latent layers' vectors of a request, on demand of a latent level
    embedder     fingerprint of the vectors' embedder; stored vectors of others are ignored
    background   index stored chunks in a thread; lookups search the part indexed so far
    """

    def __init__(
        self,
        store: Store,
        levels: Sequence[Level] = (),
        guards: Sequence[Guard] = (),
        config: SemanticCacheConfig | None = None,
        *,
        embed: Embed = no_vectors,
        embedder: str = "",
        background: bool = False,
    ) -> None:
        self.config = config or SemanticCacheConfig()
        self._lifetime = self.config.lifetime(self.config.ttl_prompts)
        self._finds_prefixes, self._keeps_exact = self.config.finds_prefixes, not self.config.quantizes
        self.store = store
        self.levels = tuple(levels)
        self.guards = tuple(guards)
        self.embed = embed
        self.embedder = embedder
        self._background = background
        self._lock = fork_safe_rlock()  # again where the store tells of an entry that left while it is read
        self.counts = PartitionCounts(self._lock)
        # Of copied text nobody pays for an index before a piecewise method is asked for.
        at_once = self.config.copied_text and ReuseRequest(self.config.reuse).piecewise
        self._copied = CopiedText(store) if at_once else None
        self._threads: list[threading.Thread] = []
        self._fillings = 0
        self._left: set[str] = set()  # from the store, while it is indexed
        self._stopped = False

    def decide(self, prepared: Prepared, ask: ReuseRequest, *, costs: ReuseCosts | None = None) -> Decision:
        """Decide how to run a prompt with state of `prepared.epoch`.

        costs  of computing and loading in the engine; None: unknown, and the plan with most reuse runs

        Never raises for the state of the cache. Raises: ConfigError for a level with wrong settings.
        """
        began = time.perf_counter()
        # Guards see the request alone, so its threshold must be the one that counts.
        if ask.threshold != prepared.request.threshold:
            prepared = replace(prepared, request=replace(prepared.request, threshold=ask.threshold))
        entry, query = self._asked(prepared)
        statuses: dict[str, Status] = {}
        # Its own state first: by its id, without any search.
        exact_meta = self._known(entry.id, prepared)
        donor_search = self._find(query, exact_meta, prepared, ask, statuses)
        tokens = len(prepared.token_ids)
        if self._finds_prefixes:
            # All but the last token, whose logits give the answer.
            prefix = (
                (PrefixHit(entry.id, tokens - 1), exact_meta)
                if exact_meta is not None
                else self._longest_prefix(prepared)
            )
            donor_search = replace(donor_search, prefix=prefix)

        same = bool(donor_search.donors) and donor_search.donors[0].id == entry.id
        if not same:
            donor_search = self._estimated(donor_search, prepared, ask, exactly=costs is not None)
        plans, considered = choose(
            tokens,
            donor_search,
            ask,
            self.config,
            same=same,
            costs=costs,
            piece=prepared.piece,
            read_seconds=self.store.away,
        )

        seconds = time.perf_counter() - began
        return Decision(entry, ask, plans, donor_search, query, settled(statuses, plans[0]), seconds, considered)

    def exactly(self, prepared: Prepared, *, costs: ReuseCosts | None = None) -> Decision:
        """Decide how to compute a prompt exactly, without comparison."""
        return self.decide(prepared, ReuseRequest(levels=False), costs=costs)

    def fully(self, prepared: Prepared, reason: str) -> Decision:
        """Decide to compute a prompt in full, without a lookup."""
        entry, query = self._asked(prepared)
        return Decision(
            entry, ReuseRequest("off", no_store=True), (replace(FULL, reason=reason),), DonorSearch(), query, {}
        )

    def fill(self) -> None:
        """Make all stored chunks findable."""
        self._fill(self.levels)

    def wait(self) -> None:
        """Wait until all chunks stored before this finder can be found."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Stop the indexing."""
        self._stopped = True
        self.wait()

    def asked(self, statuses: Mapping[str, Status]) -> bool:
        """Whether a lookup asked every level, so that the prompt's vectors are known."""
        return all(any(statuses.get(name, "skip") != "skip" for name in level.status_names) for level in self.levels)

    def add(self, meta: ChunkMeta, *, levels: bool = True) -> bool:
        """Make a stored chunk findable. False if it has left the store meanwhile.

        Exact state is added to every level (without `levels`, only to those without vectors), rows of a blend for later blends alone.
        """
        with self._lock:
            # It may have left and come back while the store is indexed.
            self._left.discard(meta.id)
        self._add(meta, self.levels if levels else self._exact)
        # Asked after it was added: a removal in between has found nothing to remove.
        if self.store.meta(meta.id) is not None:
            return True
        self.remove(meta.id)
        return False

    @property
    def level_names(self) -> list[str]:
        """Names under which a hit may be counted."""
        names = [name for level in self.levels for name in level.status_names]
        return [*names, *([COPIED] if self._copied is not None else [])]

    @property
    def _exact(self) -> list[Level]:
        """Levels without vectors."""
        return [level for level in self.levels if isinstance(level, ExactTextCache)]

    def remove(self, donor: str) -> None:
        """Make a chunk unfindable."""
        with self._lock:
            # The thread that fills the index may still hold a description of it.
            if self._fillings:
                self._left.add(donor)
            if self._copied is not None:
                self._copied.remove(donor)
            for level in self.levels:
                level.remove(donor)

    def vectors(self, query: Query) -> Vectors:
        """Text and latent vectors of a request, stored with it to spare embedding after a restart."""
        for level in self.levels:
            _encode(level, query)
        return {**query.vectors, **{name: row for name, row in query.encoded.items() if row is not None}}

    def _fill(self, levels: Sequence[Level]) -> None:
        """Index the store by copied text and these levels, in a thread if `background`."""
        with self._lock:
            self._fillings += 1
        if self._background:
            self._threads.append(threading.Thread(target=self._index, args=(levels,), name="dejakv-fill", daemon=True))
            self._threads[-1].start()
        elif (failed := self._index(levels)) is not None:
            raise failed

    def _index(self, levels: Sequence[Level]) -> Exception | None:
        """Add the stored chunks; returns the first error, which costs hits of its chunk alone."""
        failed: Exception | None = None
        try:
            listed = takewhile(lambda _: not self._stopped, self.store.metas())
            metas = sorted(listed, key=lambda meta: meta.created)  # the newest is found first
            if levels:
                self._warn_of_vectors(metas)
            for first in takewhile(lambda _: not self._stopped, range(0, len(metas), FILLED_AT_ONCE)):
                batch, alone = metas[first : first + FILLED_AT_ONCE], False
                try:
                    self._add_copied(batch)
                except Exception:  # because of one of them: each is added by itself
                    alone = True
                for meta in batch:
                    try:
                        if alone:
                            self._add_copied([meta])
                        self._add_to(levels, meta)
                    except Exception as error:
                        failed = failed or error
        except Exception as error:
            failed = error

        with self._lock:
            self._fillings -= 1
            # Another filling may still hold descriptions of what has left.
            if not self._fillings:
                self._left.clear()

        if failed is not None:
            logger.warning("not every level finds all stored prompts until the next start: %s", failed)
        return failed

    def _add(self, meta: ChunkMeta, levels: Sequence[Level]) -> None:
        """Add a chunk to copied text and these levels, unless it has left the store."""
        self._add_copied([meta])
        self._add_to(levels, meta)

    def _add_copied(self, metas: Sequence[ChunkMeta]) -> None:
        copied = self._copied
        metas = [meta for meta in metas if serves_blends(meta, self.config)]
        if copied is None or not metas:
            return
        # Outside of the lock: lookups would wait for it.
        prints = fingerprints_of(metas)
        with self._lock:
            present = [number for number, meta in enumerate(metas) if meta.id not in self._left]
            copied.add([metas[number] for number in present], [prints[number] for number in present])

    def _add_to(self, levels: Sequence[Level], meta: ChunkMeta) -> None:
        # Rows of a blend are no answer to any prompt: only blends take them.
        if meta.kind != KV or not levels:
            return

        request = Request.stored(meta.prompt, meta.chunk, meta.partition)
        stored = meta.vectors if meta.embedder == self.embedder else {}
        texts = {"text": stored["text"]} if "text" in stored else {}
        query = Query(request, meta.space, lambda: stored, texts)
        for level in levels:
            _encode(level, query)
        with self._lock:
            if meta.id not in self._left:
                for level in levels:
                    level.add(meta.id, query)

    def _warn_of_vectors(self, metas: Sequence[ChunkMeta]) -> None:
        """Warn of stored prompts with vectors of another embedder, if a level compares vectors."""
        prompts = [meta for meta in metas if meta.kind == KV and meta.chunk]
        foreign_count = sum(meta.embedder != self.embedder for meta in prompts)
        if foreign_count and any(hasattr(level, "encode") for level in self.levels):
            logger.warning(
                "%d of %d stored prompts have vectors of other settings (index_encoder, with `model` the model itself, chunk_window, "
                "levels or embedding_hook): texts are embedded again, now and at each start, and latent layers find none of these "
                "prompts. The earlier settings use these vectors; dejakv cache purge removes the prompts", foreign_count, len(prompts),
            )  # fmt: skip

    def _asked(self, prepared: Prepared) -> tuple[ChunkMeta, Query]:
        """Describe the prompt's exact state, stored or not, and its query for the levels."""
        request = prepared.request
        digests = [span.digest for span in prepared.spans]
        query = Query(request, space_of(prepared, self.config.media), lambda: self.embed(request))
        entry = ChunkMeta(
            id=exact_key(request.partition, prepared.epoch, prepared.token_ids, digests),
            partition=request.partition,
            epoch=prepared.epoch,
            token_ids=prepared.token_ids,
            prompt=request.prompt,
            chunk=request.chunk,
            space=query.space,
            spans=prepared.spans,
            embedder=self.embedder,
            ttl=shortest(request.ttl, self._lifetime),
            metadata={"request": request.id} | ({QUESTION: request.question} if request.question else {}),
        )
        return entry, query

    def _find(
        self,
        query: Query,
        exact_meta: ChunkMeta | None,
        prepared: Prepared,
        ask: ReuseRequest,
        statuses: dict[str, Status],
    ) -> DonorSearch:
        """Find donors; `exact_meta`: the prompt's own state, preferred to any other."""
        if exact_meta is not None and self._fillings:
            self._add(exact_meta, self._exact)  # stored, but perhaps not indexed yet
        if ask.named:
            return self._named(ask, exact_meta, prepared)
        if exact_meta is None and self.config.copied_text and ask.piecewise:
            copied = self._copied_text(prepared, ask)
            statuses["copied"] = "hit" if copied.match else "miss"
            if copied.match is not None:
                statuses.update(skipped(self.levels))
                return copied
        return self._alike(query, exact_meta, prepared, ask, statuses) if ask.levels else DonorSearch()

    def _named(self, ask: ReuseRequest, exact_meta: ChunkMeta | None, prepared: Prepared) -> DonorSearch:
        """Donors named by the caller, or the prompt's own state."""
        if exact_meta is not None:
            return DonorSearch(Match(exact_meta.id, "exact_text", 1.0), (exact_meta,))
        named = dict.fromkeys(ask.named)
        donors = self._donors(named, prepared, ask)[: ask.most_donors(self.config)]
        unknown = Verdict("reject", NAMED, "a donor that the request names is not known in its partition")

        strange = sum(self._known(id, prepared, ask.method) is None for id in named)
        return DonorSearch(Match(donors[0].id, NAMED, 1.0) if donors else None, donors, verdicts=(unknown,) * strange)

    def _copied_text(self, prepared: Prepared, ask: ReuseRequest) -> DonorSearch:
        """Donors of the prompt's text, largest share first; none if they cover too little."""
        with self._lock:
            # Under the lock: of two first requests one alone fills the index.
            begins = self._copied is None
            copied = self._copied = CopiedText(self.store) if self._copied is None else self._copied
        if begins:
            # Outside of the lock, which the filling takes again and again.
            self._fill(())
        with self._lock:
            cover = copied.search(prepared, prepared.epoch)

        donors = self._donors(cover.donors[: ask.most_donors(self.config)], prepared, ask)
        used = {meta.id for meta in donors}
        runs = tuple((run.start, run.length) for run in cover.runs if run.donor in used)
        covered_tokens = sum(length for _, length in runs)
        if not donors or covered_tokens < max(LEAST_COPIED, ask.threshold or 0.0) * cover.tokens:
            return DonorSearch()
        return DonorSearch(
            Match(donors[0].id, COPIED, covered_tokens / cover.tokens), donors, copied=covered_tokens, runs=runs
        )

    def _alike(
        self,
        query: Query,
        exact_meta: ChunkMeta | None,
        prepared: Prepared,
        ask: ReuseRequest,
        statuses: dict[str, Status],
    ) -> DonorSearch:
        """Donors of the first level with an accepted one. Raises: ConfigError for a level with wrong settings."""
        match: Match | None = None
        donors: list[ChunkMeta] = []
        verdicts: list[Verdict] = []
        for place, level in enumerate(self.levels):
            try:
                _encode(level, query)
                with self._lock:
                    search = level.search(query)
            except ConfigError:
                raise  # a setting is wrong, and its message says which
            except Exception as error:  # a level may be foreign code: its failure costs its own hits
                statuses[level.name] = "skip"
                logger.debug("the level %s failed", level.name, exc_info=True)  # its message may hold a donor's text
                verdicts.append(Verdict("reject", level.name, f"the level failed: {type(error).__name__}"))
                continue
            statuses.update(search.statuses)

            for candidate in _own_first(search.matches, exact_meta):
                meta = (
                    exact_meta
                    if exact_meta is not None and candidate.donor == exact_meta.id
                    else self._known(candidate.donor, prepared)
                )
                if meta is None:
                    continue
                # Equal tokens need no guard: its state is exact.
                if meta is not exact_meta:
                    active_guards = [guard for guard in self.guards if not (ask.piecewise and guard.waived_for_blend)]
                    verdicts.append(judge(active_guards, query.request, meta, candidate))
                    if verdicts[-1].decision != "accept":
                        continue

                match = match or candidate
                donors.append(meta)
                if meta is exact_meta or len(donors) >= ask.most_donors(self.config):
                    break
            if match is not None:
                statuses.update({**skipped(self.levels[place + 1 :]), **statuses})
                break
            # The level had candidates, and the guards accepted none of them.
            statuses.update({name: "miss" for name, status in search.statuses.items() if status == "hit"})
        return DonorSearch(match, tuple(donors), verdicts=tuple(verdicts))

    def _estimated(
        self, donor_search: DonorSearch, prepared: Prepared, ask: ReuseRequest, *, exactly: bool
    ) -> DonorSearch:
        """Add the donors' runs, as short as the method takes them; none for a token map without runs.

        exactly  False: verified runs suffice, the engine examines other donors
        """
        by_runs = ask.method == "top_layer" or self.config.blend_map == SemanticCacheConfig.blend_map
        if not (ask.piecewise and by_runs and donor_search.donors):
            return donor_search
        if not exactly:
            return replace(donor_search, held=donor_search.runs) if donor_search.copied is not None else donor_search

        with self._lock:
            index = self._copied
            donor_tokens = [
                index.tokens(meta) if index else with_media(meta.token_ids, meta.spans) for meta in donor_search.donors
            ]
        target = with_media(prepared.token_ids, prepared.spans)
        short_runs = overlap(target, donor_tokens, PAIR if ask.method == "top_layer" else RUN)
        return replace(donor_search, held=short_runs, runs=donor_search.runs or short_runs)

    def _donors(self, ids: Iterable[str], prepared: Prepared, ask: ReuseRequest) -> tuple[ChunkMeta, ...]:
        """Chunks that may serve the request."""
        metas = (self._known(id, prepared, ask.method) for id in ids)
        return tuple(meta for meta in metas if meta is not None and serves_blends(meta, self.config))

    def _known(self, id: str, prepared: Prepared, method: Method = "exact") -> ChunkMeta | None:
        """Describe a chunk of the request's partition and epoch: exact state, or rows for a blend."""
        meta = self.store.meta(id)
        # Whatever an index says: no state crosses tenants or models.
        if meta is None or (meta.partition, meta.epoch) != (prepared.request.partition, prepared.epoch):
            return None
        return meta if (self._keeps_exact and meta.kind == KV) or method == "blend" else None

    def _longest_prefix(self, prepared: Prepared) -> tuple[PrefixHit, ChunkMeta] | None:
        return self.store.find(prepared.request.partition, prepared.epoch, prepared.token_ids, prepared.spans)


def space_of(prepared: Prepared, media: str) -> str:
    """Name of the space of comparable requests: partition, epoch and, with `media="exact"`, media."""
    request = prepared.request
    digests = [item.digest for item in request.media] or [span.digest for span in prepared.spans]
    # Prompts with and without media are never compared, whatever the setting.
    apart = media_key(digests) if media == "exact" else ("media" if digests else "")
    return digest_of("space", request.partition, prepared.epoch, apart)[:40]


def skipped(levels: Sequence[Level]) -> dict[str, Status]:
    """Status table of levels that were not asked."""
    return {name: "skip" for level in levels for name in level.status_names}


def _encode(level: Level, query: Query) -> None:
    encode = getattr(level, "encode", None)
    if encode is not None:
        encode(query)


def _own_first(matches: Sequence[Match], exact_meta: ChunkMeta | None) -> list[Match]:
    """Put the prompt's own chunk before others of equal text, for an exact hit."""
    if exact_meta is not None and matches and matches[0].level == "exact_text":
        return [replace(matches[0], donor=exact_meta.id)]
    return sorted(matches, key=lambda match: exact_meta is None or match.donor != exact_meta.id)
