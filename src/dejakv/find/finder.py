"""Find, judge, plan: for a request, the cheapest way to run it that its caller allows.

    decision = finder.find(prepared, Ask("blend"))
    decision.plan.method, decision.plan.donors, decision.plan.reason

It knows neither torch nor an engine. What it finds is described in a store; whose state that is, and how it is run, is the
caller's business: a pipeline's, the vLLM connector's, or that of an HTTP front that rewrites prompts.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dejakv.config import SemanticCacheConfig
from dejakv.costs import Costs
from dejakv.counts import PartitionCounts
from dejakv.encoders.base import Closes
from dejakv.engines.base import Prepared
from dejakv.find.ask import Ask
from dejakv.find.bound import bound_by
from dejakv.find.candidates import PlanGuard
from dejakv.find.copies import Copies
from dejakv.find.decision import Decision, settled
from dejakv.find.filling import Filling, warn_of_vectors
from dejakv.find.found import Found
from dejakv.find.likeness import Likeness, skipped
from dejakv.find.overlap import by_context, estimated
from dejakv.find.plan import plan
from dejakv.find.rows import serves_blends
from dejakv.find.space import space_of as space_of
from dejakv.guards.base import Guard, Verdict
from dejakv.guards.bounded import Bounded
from dejakv.identity import exact_key
from dejakv.levels.base import ComparesText, Level, Match, Query, Status, Vectors
from dejakv.levels.exact import ExactTextCache
from dejakv.request import Request
from dejakv.store.base import KV, ChunkMeta, Store
from dejakv.store.prefix import EpochPrefixes, PrefixHit, PrefixIndex

Embed = Callable[[Request], Vectors]
NAMED = "named"
"""Level of a donor that the caller named."""


def no_vectors(_: Request) -> Vectors:
    return {}


class Finder:
    """Levels, guards and plan over one store. Thread-safe; partitions and epochs never see each other.

    levels   tried in order; the first whose donor passes the guards wins
    guards   asked for whatever is not exact
    embed    computes the latent layers' vectors of a request, called only when a latent level asks
    embedder fingerprint of whatever makes vectors; stored vectors of another embedder are not used
    bounded  judges every approximate plan by an error bound, also one from donors that no guard was asked about
    plan_guards  of the caller's own; they judge approximate plans beside `LeastGain` and `MostRows`
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
        bounded: Bounded | None = None,
        plan_guards: Sequence[PlanGuard] = (),
    ) -> None:
        self.config = config or SemanticCacheConfig()
        self.store = store
        self.levels = tuple(levels)
        self._of_text = [level for level in levels if isinstance(level, ComparesText)]
        self.guards = tuple(guards)
        self.likeness = Likeness(self.levels, self.guards)
        self.embed = embed
        self.embedder = embedder
        self.bounded = bounded
        self.plan_guards = tuple(plan_guards)
        self.counts = PartitionCounts()
        self._prefix = PrefixIndex(store)
        self.copied = Copies(store, self.config)
        self._filling = Filling(store)

    def find(self, prepared: Prepared, ask: Ask, *, costs: Costs | None = None) -> Decision:
        """Decides how to run a prompt whose state would be of the epoch `prepared.epoch`.

        costs  what computing and loading take in the engine; None: not known, and the way that reuses most runs

        Never raises for the state of the cache. Raises: ConfigError for a level whose settings are wrong.
        """
        began = time.perf_counter()
        prepared = replace(prepared, request=replace(prepared.request, threshold=ask.threshold))
        key, query = self._asked(prepared)
        statuses: dict[str, Status] = {}
        found = self._find(query, key, prepared, ask, statuses, costs)
        found = replace(found, prefix=self._longest_prefix(prepared, key) if self.config.exact_prefix else None)
        found = estimated(found, prepared, key, ask, self.config, self.copied.tokens, exactly=costs is not None)
        config, tokens = self.config, len(prepared.token_ids)
        planned = plan(
            tokens, found, ask, same=bool(found.donors) and found.donors[0].id == key, min_gain=config.min_gain,
            share=config.blend.share, most=self._most(ask), tail=config.top_layer_tail, costs=costs,
            guards=self.plan_guards, piece=prepared.piece,
        )  # fmt: skip
        planned, trial = bound_by(self.bounded, config, prepared, found, ask, planned)
        chosen, partition = planned.plan, query.request.partition
        self.counts.lookup(partition, found.verdicts)
        self.counts.planned(partition, chosen.match, chosen.method == "prefix")
        seconds, statuses = time.perf_counter() - began, settled(statuses, chosen)
        return Decision(
            key, tokens, ask, chosen, planned.exact, found, query, statuses, seconds, planned.candidates, trial
        )

    def find_again(self, before: Decision, prepared: Prepared, ask: Ask) -> Decision:
        """`find` for a request that was looked up before without the levels: the two count as one lookup."""
        decision, plan = self.find(prepared, ask), before.plan
        self.counts.take_back(prepared.request.partition, plan.match, plan.method == "prefix")
        return decision

    def seeks_like(self, copied: Found, tokens: int, ask: Ask, costs: Costs | None, least: int = 0) -> bool:
        """Whether donors that are only like a prompt of `tokens` tokens are looked for beside those of copied text: so much is new
        that they may hold some of it. `least`: rows that a blend computes in any case, as far as that is known."""
        asks = ask.levels and ask.method == "blend" and by_context(self.config)
        if not asks or len(copied.donors) >= self._most(ask):
            return False
        return self.likeness.worth_asking(tokens - (copied.copied or 0), tokens, costs, least)

    def exactly(self, prepared: Prepared, *, costs: Costs | None = None) -> Decision:
        """How to compute a prompt exactly, for the cache's own purposes: nothing is compared, and no lookup is counted."""
        key, query = self._asked(prepared)
        found = Found(prefix=self._longest_prefix(prepared, key) if self.config.exact_prefix else None)
        planned = plan(len(prepared.token_ids), found, Ask(), costs=costs, piece=prepared.piece)
        return Decision(key, len(prepared.token_ids), Ask(), planned.plan, planned.exact, found, query, {})

    def fill(self) -> None:
        """Makes all that is stored findable. What leaves meanwhile does not stay so if the store tells `remove` of it."""
        with self._filling.listed(self.remove) as metas:
            text, latent = bool(self._of_text), bool(self.config.embedding_layers)
            warn_of_vectors(metas, self.embedder, text=text, latent=latent)
            for meta in metas:  # the newest is found first
                self.add(meta)

    def asked(self, statuses: Mapping[str, Status]) -> bool:
        """Whether a lookup asked every level, so that the prompt's vectors are known."""
        return all(any(statuses.get(name, "skip") != "skip" for name in level.status_names) for level in self.levels)

    def add(self, meta: ChunkMeta, *, levels: bool = True) -> None:
        """Makes a chunk findable: exact state by every level (without `levels` only by those that need no vectors), rows of a
        blended prompt for later blends alone."""
        self.copied.add(meta)
        if meta.kind != KV:
            return
        request = Request(id="", prompt=meta.prompt, chunk=meta.chunk, partition=meta.partition)
        known = meta.embedder == self.embedder
        query = Query(request, meta.space, lambda: meta.vectors if known else no_vectors(request))
        if self.config.exact_prefix:
            self._prefix.add(meta)
        for level in self.levels:
            if levels or isinstance(level, ExactTextCache):
                level.add(meta.id, query)

    def close(self) -> None:
        """Ends what levels have running."""
        for level in self.levels:
            if isinstance(level, Closes):
                level.close()

    def remove(self, donor: str) -> None:
        """Makes a chunk unfindable."""
        self._filling.left(donor)
        self._prefix.remove(donor)
        self.copied.remove(donor)
        for level in self.levels:
            level.remove(donor)

    def clear(self, partition: str) -> None:
        """Forgets what was counted and remembered of one partition; its chunks leave by `remove`."""
        self.counts.clear(partition)
        self.copied.forget(partition)

    def prefixes(self, epoch: str) -> EpochPrefixes:
        """How much of a prompt is a prefix of a stored one."""
        return EpochPrefixes(self._prefix, epoch)

    def vectors(self, query: Query) -> Vectors:
        """Text and latent vectors of a request, to be stored with it, so that a restart embeds nothing again."""
        vectors = dict(query.vectors)
        for level in self._of_text:
            text = level.vector(query.text, query.request.partition)
            if text is not None:
                vectors["text"] = text
        return vectors

    def _asked(self, prepared: Prepared) -> tuple[str, Query]:
        """A prompt's exact key, and what the levels are asked."""
        request = prepared.request
        key = exact_key(request.partition, prepared.epoch, prepared.token_ids, [span.digest for span in prepared.spans])
        return key, Query(request, space_of(prepared, self.config.media), lambda: self.embed(request))

    def _find(
        self, query: Query, key: str, prepared: Prepared, ask: Ask, statuses: dict[str, Status], costs: Costs | None
    ) -> Found:
        own = self._of_caller(key, query.request, prepared.epoch)
        if ask.named:
            return self._named(ask, own, prepared)
        if ask.piecewise and ask.similar and own is None:
            copied = self.copied.search(prepared, self._describes(ask, prepared), self._most(ask), ask.threshold)
            if copied is not None:
                statuses["copied"] = "hit" if copied.match else "miss"
                if copied.match is not None:
                    return self._with_like(copied, query, prepared, ask, statuses, costs)
        if not (ask.similar and ask.levels):
            return Found()
        found = self.likeness.search(
            query, self._known_to(prepared), blends=ask.piecewise, most=self._most(ask), own=own
        )
        statuses.update(found.statuses)
        return Found(found.match, found.donors, verdicts=found.verdicts, failed=found.failed)

    def _with_like(
        self, found: Found, query: Query, prepared: Prepared, ask: Ask, statuses: dict[str, Status], costs: Costs | None
    ) -> Found:
        """Copied text, and donors that are only like the prompt beside it, if so much is new that they may hold some of it."""
        if not self.seeks_like(found, len(prepared.token_ids), ask, costs):
            statuses.update(skipped(self.levels))
            return found
        used = [meta.id for meta in found.donors]
        room, known = self._most(ask) - len(used), self._known_to(prepared)
        alike = self.likeness.search(query, known, blends=True, most=room, without=used)
        statuses.update(alike.statuses)
        return replace(found, verdicts=alike.verdicts, like=alike.donors, failed=alike.failed)

    def _known_to(self, prepared: Prepared) -> Callable[[str], ChunkMeta | None]:
        """Descriptions of the donors that a prompt may use, by their ids."""
        return lambda id: self._of_caller(id, prepared.request, prepared.epoch)

    def _named(self, ask: Ask, own: ChunkMeta | None, prepared: Prepared) -> Found:
        """The donors that the caller named, or the prompt's own state, which is always better."""
        if own is not None:
            return Found(Match(own.id, "exact_text", 1.0), (own,))
        metas = list(map(self._describes(ask, prepared), dict.fromkeys(ask.named)))
        usable = tuple(meta for meta in metas if meta is not None and serves_blends(meta, self.config.max_generation))
        donors = usable[: self._most(ask)]
        unknown = Verdict("reject", NAMED, "a donor that the request names is not known in its partition")
        verdicts = (unknown,) * metas.count(None)
        return Found(Match(donors[0].id, NAMED, 1.0) if donors else None, donors, verdicts=verdicts)

    def _most(self, ask: Ask) -> int:
        """How many donors are of use."""
        if not ask.piecewise:
            return 1
        return min(self.config.blend_donors, ask.donors or self.config.blend_donors)

    def _describes(self, ask: Ask, prepared: Prepared) -> Callable[[str], ChunkMeta | None]:
        """Descriptions of a method's donors by their ids: rows of a blend serve blends alone."""
        known = self._known if ask.method == "blend" else self._of_caller
        return lambda id: known(id, prepared.request, prepared.epoch)

    def _of_caller(self, id: str, request: Request, epoch: str) -> ChunkMeta | None:
        """The description of a prompt whose exact state is stored, if it is of the request's own partition and epoch."""
        meta = self._known(id, request, epoch)
        return meta if meta is not None and meta.kind == KV else None

    def _known(self, id: str, request: Request, epoch: str) -> ChunkMeta | None:
        """The same of a chunk of any kind."""
        meta = self.store.meta(id)
        return meta if meta is not None and (meta.partition, meta.epoch) == (request.partition, epoch) else None

    def _longest_prefix(self, prepared: Prepared, key: str) -> tuple[PrefixHit, ChunkMeta] | None:
        request, ids, spans = prepared.request, prepared.token_ids, prepared.spans
        if self._of_caller(key, request, prepared.epoch) is not None:
            hit = PrefixHit(key, len(ids) - 1)  # the prompt itself: nothing is longer
        else:
            hit = self._prefix.longest(request.partition, prepared.epoch, ids, spans)
        if hit is None:
            return None
        meta = self.store.meta(hit.donor)
        return (hit, meta) if meta is not None else None
