"""Search for donors, judge them, and decide on the cheapest allowed way to run a request.

This module needs neither torch nor an engine:

    decision = finder.decide(prepared, ReuseRequest("blend"))
    decision.plan.method, decision.plan.donors, decision.plan.reason
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from dejakv import tracing
from dejakv.config import SemanticCacheConfig
from dejakv.decide.choose import choose_plans
from dejakv.decide.copied.fingerprints import media_token_ids, overlap
from dejakv.decide.copied.foreign import ForeignContext
from dejakv.decide.copied.search import CopiedText, fingerprints_of
from dejakv.decide.costs import ReuseCosts
from dejakv.decide.counts import PartitionCounts
from dejakv.decide.guards.base import Guard, GuardVerdict, judge
from dejakv.decide.guards.lexical import QUESTION
from dejakv.decide.levels.base import Level, Match, Query, Status, Vectors
from dejakv.decide.levels.exact import ExactTextCache
from dejakv.decide.method import PlanInputs, method_named
from dejakv.decide.plan import (
    COPIED,
    FULL,
    Decision,
    DonorSearch,
    ReuseRequest,
    final_statuses,
    serves_blends,
)
from dejakv.errors import ConfigError
from dejakv.identity import digest_of, exact_key, media_key
from dejakv.request import Prepared, Request
from dejakv.store.base import KV, PrefixHit, StateInfo
from dejakv.store.budgets import shortest_lifetime
from dejakv.store.forks import fork_safe_rlock
from dejakv.store.store import Store

logger = logging.getLogger(__name__)

Embed = Callable[[Request], Vectors]
FILL_BATCH = 64
"""Stored prompts in one call of indexing copied text, six times as fast as one by one."""

NAMED = "named"
"""Level of a donor that the caller named."""

MIN_COPIED_SHARE = 0.25
"""Least share of a prompt that its donors must have.

With less, a blend saves hardly more than it costs, and the prompt's exact state is of more use.
Between .1 and .4 the number of computed tokens changes by at most 5% (docs/results/generations.md).
"""


def no_vectors(_: Request) -> Vectors:
    """Return no vectors, for caches without latent levels."""
    return {}


@dataclass(frozen=True)
class EpochPrefixes:
    """Stored prefixes of one epoch, as a `part_order.PrefixMemory`."""

    store: Store
    epoch: str

    def prefix_length(self, token_ids: Sequence[int], partition: str) -> int:
        """Return the number of leading tokens stored in the partition."""
        prefix_hit = self.store.find(partition, self.epoch, token_ids)
        return prefix_hit[0].tokens if prefix_hit is not None else 0


class DonorFinder:
    """Levels, guards and plans over one store.

    Thread-safe. Partitions and epochs never see each other. Levels and the index of copied text run
    under the finder's lock, encoders and guards without it.

    Parameters
    ----------
    store : Store
        Store with the donors.
    levels : Sequence[Level]
        Levels in the order of asking. The first with an accepted donor wins.
    guards : Sequence[Guard]
        Judges of every donor that is not exact.
    config : SemanticCacheConfig, optional
        Settings of the cache.
    embed : Embed
        Function that computes the latent layers' vectors of a request when a latent level needs
        them.
    embedder : str
        Fingerprint of the vectors' embedder. Stored vectors of others are ignored.
    background : bool
        Index stored prompts in a thread. Until it ends, lookups search the part indexed so far.
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
        self._finds_prefixes = self.config.exact_prefix

        self.store = store
        self.levels = tuple(levels)
        self.guards = tuple(guards)
        self.embed = embed
        self.embedder = embedder
        self._background = background
        # Reentrant: the store may tell of an entry that left while it is read under this lock.
        self._lock = fork_safe_rlock()
        self.counts = PartitionCounts(self._lock)
        # Of copied text nobody pays for an index before a piecewise method is asked for.
        at_once = self.config.copied_text and ReuseRequest(self.config.reuse).piecewise
        self._copied = CopiedText(store, self.config.foreign_context) if at_once else None
        self._threads: list[threading.Thread] = []
        self._fillings = 0
        # Ids that left the store while it is indexed.
        self._removed_ids: set[str] = set()
        self._stopped = False

    def decide(
        self, prepared: Prepared, ask: ReuseRequest, *, costs: ReuseCosts | None = None
    ) -> Decision:
        """Decide how to run a prompt with state of `prepared.epoch`.

        The state of the cache never makes it raise.

        Parameters
        ----------
        costs : ReuseCosts, optional
            Costs of computing and loading in the engine. With None, the plan with most reuse runs.

        Raises
        ------
        ConfigError
            If a level has wrong settings, or the method that is asked for is unknown.
        """
        began = time.perf_counter()

        # Guards see the request alone, so its threshold must be the one that counts.
        if ask.threshold != prepared.request.threshold:
            prepared = replace(prepared, request=replace(prepared.request, threshold=ask.threshold))
        entry, query = self._describe(prepared)
        statuses: dict[str, Status] = {}

        with tracing.span("dejakv.lookup") as span:
            # Its own state first: by its id, without any search.
            exact_meta = self._servable(entry.id, prepared)
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
                donor_search = self._estimate_runs(
                    donor_search, prepared, ask, exactly=costs is not None
                )
            if span is not None:
                span.set_attributes(tracing.present(_lookup_attributes(donor_search, statuses)))

        with tracing.span("dejakv.decision") as span:
            plans, considered = choose_plans(
                PlanInputs(tokens, donor_search, ask, self.config, costs, prepared.prefill_unit),
                same=same,
                read_seconds=self.store.remote_read_seconds,
            )
            if span is not None:
                attributes = {
                    "dejakv.method": plans[0].method,
                    "dejakv.reason": plans[0].reason,
                    "dejakv.plans": [str(plan) for plan in considered],
                }
                span.set_attributes(tracing.present(attributes))

        seconds = time.perf_counter() - began
        return Decision(
            entry,
            ask,
            plans,
            donor_search,
            query,
            final_statuses(statuses, plans[0]),
            seconds,
            considered,
        )

    def decide_exact(self, prepared: Prepared, *, costs: ReuseCosts | None = None) -> Decision:
        """Decide how to compute a prompt exactly, without comparing it to others."""
        return self.decide(prepared, ReuseRequest(levels=False), costs=costs)

    def decide_full(self, prepared: Prepared, reason: str) -> Decision:
        """Decide to compute a prompt in full for `reason`, without a lookup; nothing is stored."""
        entry, query = self._describe(prepared)
        return Decision(
            entry,
            ReuseRequest("off", no_store=True),
            (replace(FULL, reason=reason),),
            DonorSearch(),
            query,
            {},
        )

    def fill(self) -> None:
        """Index all stored prompts, in a thread with `background`.

        A prompt that cannot be indexed is left out. Without `background` the first such error is
        raised at the end; the thread logs it.
        """
        self._fill(self.levels)

    def wait(self) -> None:
        """Wait until all prompts that were stored before this finder began are indexed."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Stop the indexing and wait for its threads."""
        self._stopped = True
        self.wait()

    def queried_all_levels(self, statuses: Mapping[str, Status]) -> bool:
        """Return whether a lookup asked every level, so that the prompt's vectors are known."""
        return all(
            any(statuses.get(name, "skip") != "skip" for name in level.status_names)
            for level in self.levels
        )

    def add(self, meta: StateInfo, *, levels: bool = True) -> bool:
        """Index a stored prompt.

        Exact state is added to the levels and to copied text, rows of a blend to copied text alone,
        for later blends.

        Parameters
        ----------
        levels : bool
            Add exact state to every level. With False, only to those without vectors.

        Returns
        -------
        bool
            False if the prompt has left the store meanwhile.
        """
        with self._lock:
            # It may have left and come back while the store is indexed.
            self._removed_ids.discard(meta.id)
        self._add(meta, self.levels if levels else self._exact_levels)
        # Asked after it was added: a removal in between has found nothing to remove.
        if self.store.meta(meta.id) is not None:
            return True

        self.remove(meta.id)
        return False

    @property
    def level_names(self) -> list[str]:
        """Names under which a hit may be counted."""
        # Copied text has no level object, but its hits are counted like a level's.
        names = [name for level in self.levels for name in level.status_names]
        return [*names, *([COPIED] if self._copied is not None else [])]

    @property
    def _exact_levels(self) -> list[Level]:
        """Levels without vectors."""
        return [level for level in self.levels if isinstance(level, ExactTextCache)]

    def remove(self, donor: str) -> None:
        """Remove a prompt from copied text and all levels."""
        with self._lock:
            # The thread that fills the index may still hold a description of it.
            if self._fillings:
                self._removed_ids.add(donor)
            if self._copied is not None:
                self._copied.remove(donor)
            for level in self.levels:
                level.remove(donor)

    def vectors(self, query: Query) -> Vectors:
        """Return the text and latent vectors of a request.

        They are stored with the request, so that a restart does not embed it again.
        """
        for level in self.levels:
            _encode(level, query)
        return {
            **query.vectors,
            **{name: row for name, row in query.encoded.items() if row is not None},
        }

    def _fill(self, levels: Sequence[Level]) -> None:
        """Index the store by copied text and these levels, in a thread if `background`."""
        with self._lock:
            self._fillings += 1
        if self._background:
            self._threads.append(
                threading.Thread(
                    target=self._index, args=(levels,), name="dejakv-fill", daemon=True
                )
            )
            self._threads[-1].start()
        elif (failed := self._index(levels)) is not None:
            raise failed

    def _index(self, levels: Sequence[Level]) -> Exception | None:
        """Add the stored prompts; return the first error, which costs hits of its prompt alone."""
        failed: Exception | None = None
        try:
            listed = takewhile(lambda _: not self._stopped, self.store.metas())
            # The newest last, since later entries are found first.
            metas = sorted(listed, key=lambda meta: meta.created)
            if levels:
                self._warn_of_vectors(metas)
            for first in takewhile(lambda _: not self._stopped, range(0, len(metas), FILL_BATCH)):
                batch, alone = metas[first : first + FILL_BATCH], False
                try:
                    self._add_copied(batch)
                # Because of one of them: each is added by itself, and the others stay.
                except Exception:
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
                self._removed_ids.clear()

        if failed is not None:
            logger.warning(
                "not every level finds all stored prompts until the next start: %s", failed
            )
        return failed

    def _add(self, meta: StateInfo, levels: Sequence[Level]) -> None:
        """Add a prompt to copied text and these levels, unless it has left the store."""
        self._add_copied([meta])
        self._add_to(levels, meta)

    def _add_copied(self, metas: Sequence[StateInfo]) -> None:
        copied = self._copied
        metas = [meta for meta in metas if serves_blends(meta, self.config)]
        if copied is None or not metas:
            return

        # Outside of the lock: lookups would wait for it.
        prints = fingerprints_of(metas)
        with self._lock:
            present = [
                number for number, meta in enumerate(metas) if meta.id not in self._removed_ids
            ]
            copied.add(
                [metas[number] for number in present], [prints[number] for number in present]
            )

    def _add_to(self, levels: Sequence[Level], meta: StateInfo) -> None:
        # Rows of a blend are no answer to any prompt: only blends take them.
        if meta.kind != KV or not levels:
            return

        request = Request.from_store(meta.prompt, meta.chunk, meta.partition)

        # Vectors of another embedder cannot be compared with new ones.
        stored = meta.vectors if meta.embedder == self.embedder else {}
        texts = {"text": stored["text"]} if "text" in stored else {}
        query = Query(request, meta.space, lambda: stored, texts)
        for level in levels:
            _encode(level, query)
        with self._lock:
            if meta.id not in self._removed_ids:
                for level in levels:
                    level.add(meta.id, query)

    def _warn_of_vectors(self, metas: Sequence[StateInfo]) -> None:
        """Warn of stored prompts with vectors of another embedder, if a level compares vectors."""
        prompts = [meta for meta in metas if meta.kind == KV and meta.chunk]
        foreign_count = sum(meta.embedder != self.embedder for meta in prompts)
        # A level may leave a stored text without a vector of its encoder as it is.
        embeds = (
            getattr(level, "embeds_stored", hasattr(level, "encode")) for level in self.levels
        )
        if foreign_count and any(embeds):
            logger.warning(
                "%d of %d stored prompts have vectors of other settings (index_encoder, with "
                "`model` the model itself, chunk_window, levels or embedding_hook): texts are "
                "embedded again, now and at each start, and latent layers find none of these "
                "prompts. The earlier settings use these vectors; dejakv cache purge removes the "
                "prompts",
                foreign_count,
                len(prompts),
            )

    def _describe(self, prepared: Prepared) -> tuple[StateInfo, Query]:
        """Describe the prompt's exact state, stored or not, and its query for the levels."""
        request = prepared.request
        digests = [span.digest for span in prepared.spans]
        query = Query(request, space_of(prepared, self.config.media), lambda: self.embed(request))

        entry = StateInfo(
            id=exact_key(request.partition, prepared.epoch, prepared.token_ids, digests),
            partition=request.partition,
            epoch=prepared.epoch,
            token_ids=prepared.token_ids,
            prompt=request.prompt,
            chunk=request.chunk,
            space=query.space,
            spans=prepared.spans,
            embedder=self.embedder,
            ttl=shortest_lifetime(request.ttl, self._lifetime),
            metadata={"request": request.id}
            | ({QUESTION: request.question} if request.question else {}),
        )
        return entry, query

    def _find(
        self,
        query: Query,
        exact_meta: StateInfo | None,
        prepared: Prepared,
        ask: ReuseRequest,
        statuses: dict[str, Status],
    ) -> DonorSearch:
        """Search for donors. The prompt's own state `exact_meta` is preferred to any other."""
        if exact_meta is not None and self._fillings:
            # Stored, but perhaps not indexed yet.
            self._add(exact_meta, self._exact_levels)

        if ask.named:
            return self._named_donors(ask, exact_meta, prepared)

        if exact_meta is None and self.config.copied_text and ask.piecewise:
            copied = self._search_copied(prepared, ask)
            statuses["copied"] = "hit" if copied.match else "miss"
            if copied.match is not None:
                statuses.update(skipped(self.levels))
                return copied
        return (
            self._search_levels(query, exact_meta, prepared, ask, statuses)
            if ask.levels
            else DonorSearch()
        )

    def _named_donors(
        self, ask: ReuseRequest, exact_meta: StateInfo | None, prepared: Prepared
    ) -> DonorSearch:
        """Return the donors that the caller named, or the prompt's own state."""
        if exact_meta is not None:
            return DonorSearch(Match(exact_meta.id, "exact_text", 1.0), (exact_meta,))
        # A name given twice is one donor.
        named = dict.fromkeys(ask.named)

        donors = self._donors(named, prepared, ask)[: ask.max_donors(self.config)]

        unknown = GuardVerdict(
            "reject", NAMED, "a donor that the request names is not known in its partition"
        )

        strange = sum(self._servable(id, prepared, ask.method) is None for id in named)
        return DonorSearch(
            Match(donors[0].id, NAMED, 1.0) if donors else None,
            donors,
            verdicts=(unknown,) * strange,
        )

    def _search_copied(self, prepared: Prepared, ask: ReuseRequest) -> DonorSearch:
        """Search for donors of the prompt's text, largest share first.

        The search is empty if they cover too little of the prompt.
        """
        with self._lock:
            # Under the lock: of two first requests one alone fills the index.
            begins = self._copied is None
            if self._copied is None:
                self._copied = CopiedText(self.store, self.config.foreign_context)
            copied = self._copied
        if begins:
            # Outside of the lock, which the filling takes again and again.
            self._fill(())
        with self._lock:
            cover = copied.search(prepared, prepared.epoch)

        donors = self._donors(cover.donors[: ask.max_donors(self.config)], prepared, ask)

        # Only runs of donors that are really taken count as covered.
        used = {meta.id for meta in donors}
        runs = tuple((run.start, run.length) for run in cover.runs if run.donor in used)

        covered_tokens = sum(length for _, length in runs)
        if (
            not donors
            or covered_tokens < max(MIN_COPIED_SHARE, ask.threshold or 0.0) * cover.tokens
        ):
            return DonorSearch()
        return DonorSearch(
            Match(donors[0].id, COPIED, covered_tokens / cover.tokens),
            donors,
            copied=covered_tokens,
            runs=runs,
        )

    def _search_levels(
        self,
        query: Query,
        exact_meta: StateInfo | None,
        prepared: Prepared,
        ask: ReuseRequest,
        statuses: dict[str, Status],
    ) -> DonorSearch:
        """Search the levels for donors until one has an accepted donor.

        Raises
        ------
        ConfigError
            If a level has wrong settings.
        """
        match: Match | None = None
        donors: list[StateInfo] = []
        verdicts: list[GuardVerdict] = []
        for place, level in enumerate(self.levels):
            try:
                _encode(level, query)
                with self._lock:
                    search = level.search(query)
            except ConfigError:
                # A setting is wrong, and its message says which.
                raise
            except Exception as error:
                # A level may be foreign code: its failure costs its own hits. It is logged for
                # debugging alone, since its message may hold a donor's text.
                statuses[level.name] = "skip"
                logger.debug("the level %s failed", level.name, exc_info=True)
                verdicts.append(
                    GuardVerdict("reject", level.name, f"the level failed: {type(error).__name__}")
                )
                continue
            statuses.update(search.statuses)

            for candidate in _exact_first(search.matches, exact_meta):
                meta = (
                    exact_meta
                    if exact_meta is not None and candidate.donor == exact_meta.id
                    else self._servable(candidate.donor, prepared)
                )

                if meta is None:
                    continue
                # Equal tokens need no guard: its state is exact.
                if meta is not exact_meta:
                    active_guards = [
                        guard
                        for guard in self.guards
                        if not (ask.piecewise and guard.waived_for_blend)
                    ]
                    verdicts.append(judge(active_guards, query.request, meta, candidate))
                    if verdicts[-1].decision != "accept":
                        continue

                match = match or candidate
                donors.append(meta)
                if meta is exact_meta or len(donors) >= ask.max_donors(self.config):
                    break
            if match is not None:
                statuses.update({**skipped(self.levels[place + 1 :]), **statuses})
                break
            # The level had candidates, and the guards accepted none of them.
            statuses.update(
                {name: "miss" for name, status in search.statuses.items() if status == "hit"}
            )
        return DonorSearch(match, tuple(donors), verdicts=tuple(verdicts))

    def _estimate_runs(
        self, donor_search: DonorSearch, prepared: Prepared, ask: ReuseRequest, *, exactly: bool
    ) -> DonorSearch:
        """Add the donors' runs, as short as the method takes them.

        A token map that needs no runs gets none. Without `exactly` the verified runs suffice, since
        the engine examines other donors itself.
        """
        shortest_run = method_named(ask.method).shortest_run(self.config)
        if shortest_run is None or not donor_search.donors:
            return donor_search
        if not exactly:
            return (
                replace(donor_search, short_runs=donor_search.runs)
                if donor_search.copied is not None
                else donor_search
            )

        with self._lock:
            index = self._copied
            donor_tokens = [
                index.tokens(meta) if index else media_token_ids(meta.token_ids, meta.spans)
                for meta in donor_search.donors
            ]

        # Media rows have ids of their own, so a picture matches only itself.
        target = media_token_ids(prepared.token_ids, prepared.spans)
        foreign = ForeignContext(target, self.config.foreign_context)
        donor_tokens = [
            foreign.hide(ids, meta.position)
            for ids, meta in zip(donor_tokens, donor_search.donors, strict=True)
        ]
        short_runs = overlap(target, donor_tokens, shortest_run)
        return replace(donor_search, short_runs=short_runs, runs=donor_search.runs or short_runs)

    def _donors(
        self, ids: Iterable[str], prepared: Prepared, ask: ReuseRequest
    ) -> tuple[StateInfo, ...]:
        """Describe those of the stored prompts that may serve the request."""
        metas = (self._servable(id, prepared, ask.method) for id in ids)
        return tuple(
            meta for meta in metas if meta is not None and serves_blends(meta, self.config)
        )

    def _servable(self, id: str, prepared: Prepared, method: str = "exact") -> StateInfo | None:
        """Describe a stored prompt of the request's partition and epoch that `method` can use."""
        meta = self.store.meta(id)
        # Whatever an index says: no state crosses tenants or models.
        if meta is None or (meta.partition, meta.epoch) != (
            prepared.request.partition,
            prepared.epoch,
        ):
            return None
        return meta if meta.kind == KV or method_named(method).takes_rows else None

    def _longest_prefix(self, prepared: Prepared) -> tuple[PrefixHit, StateInfo] | None:
        return self.store.find(
            prepared.request.partition, prepared.epoch, prepared.token_ids, prepared.spans
        )


def space_of(prepared: Prepared, media: str) -> str:
    """Return the name of the space of comparable requests.

    A space is a partition and an epoch, and with `media="exact"` also the request's media. Prompts
    with and without media are never in one space.
    """
    request = prepared.request
    digests = [item.digest for item in request.media] or [span.digest for span in prepared.spans]
    # Prompts with and without media are never compared, whatever the setting.
    apart = media_key(digests) if media == "exact" else ("media" if digests else "")
    return digest_of("space", request.partition, prepared.epoch, apart)[:40]


def skipped(levels: Sequence[Level]) -> dict[str, Status]:
    """Return the status table of levels that were not asked."""
    return {name: "skip" for level in levels for name in level.status_names}


def _lookup_attributes(search: DonorSearch, statuses: Mapping[str, Status]) -> dict[str, Any]:
    """Return what a lookup came to as attributes of its span."""
    match = search.match
    return {
        **{f"dejakv.status.{level}": status for level, status in statuses.items()},
        "dejakv.level": match.level if match is not None else "",
        "dejakv.score": match.score if match is not None else None,
        "dejakv.donors": len(search.donors),
        "dejakv.prefix_tokens": search.prefix[0].tokens if search.prefix is not None else 0,
        "dejakv.copied_tokens": search.copied,
        "dejakv.reason": search.refused,
    }


def _encode(level: Level, query: Query) -> None:
    encode = getattr(level, "encode", None)
    if encode is not None:
        encode(query)


def _exact_first(matches: Sequence[Match], exact_meta: StateInfo | None) -> list[Match]:
    """Put the prompt's own entry before others of equal text, for an exact hit."""
    if exact_meta is not None and matches and matches[0].level == "exact_text":
        return [replace(matches[0], donor=exact_meta.id)]
    return sorted(matches, key=lambda match: exact_meta is None or match.donor != exact_meta.id)
