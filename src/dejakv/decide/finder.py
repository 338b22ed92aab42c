"""Find, judge, plan: for a request, the cheapest way to run it that its caller allows.

    decision = finder.find(prepared, Ask("blend"))
    decision.plans[0].method, decision.plans[0].donors, decision.plans[0].reason

It knows neither torch nor an engine. What it finds is described in a store; whose state that is, and how it is run, is the
caller's business: a pipeline's, the vLLM connector's, or that of an HTTP front that rewrites prompts.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dejakv.config import SemanticCacheConfig
from dejakv.costs import Costs
from dejakv.decide.copies import Copies
from dejakv.decide.counts import PartitionCounts
from dejakv.decide.filling import Filling, warn_of_vectors
from dejakv.decide.guards.base import Guard, Verdict
from dejakv.decide.levels.base import ComparesText, Level, Match, Query, Status, Vectors
from dejakv.decide.levels.exact import ExactTextCache
from dejakv.decide.likeness import alike, skipped
from dejakv.decide.overlap import estimated
from dejakv.decide.plan import Ask, Decision, Found, Plan, PlanGuard, choose, most_computed, serves_blends, settled
from dejakv.identity import digest_of, exact_key, media_key
from dejakv.request import Prepared, Request
from dejakv.store.base import KV, ChunkMeta, PrefixHit
from dejakv.store.store import Store
from dejakv.vectors.base import Closes

Embed = Callable[[Request], Vectors]
NAMED = "named"
"""Level of a donor that the caller named."""


def no_vectors(_: Request) -> Vectors:
    return {}


@dataclass(frozen=True)
class EpochPrefixes:
    """How much of a prompt is a prefix of a stored one, as one model's prompts see it (`part_order.Prefixes`)."""

    store: Store
    epoch: str

    def held(self, token_ids: Sequence[int], partition: str) -> int:
        """How many leading tokens are stored in the partition."""
        found = self.store.find(partition, self.epoch, token_ids)
        return found[0].tokens if found is not None else 0


class Finder:
    """Levels, guards and plan over one store. Thread-safe; partitions and epochs never see each other.

    levels   tried in order; the first whose donor passes the guards wins
    guards   asked for whatever is not exact
    embed    computes the latent layers' vectors of a request, called only when a latent level asks
    embedder fingerprint of whatever makes vectors; stored vectors of another embedder are not used
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
        plan_guards: Sequence[PlanGuard] = (),
    ) -> None:
        self.config = config or SemanticCacheConfig()
        self.store = store
        self.levels = tuple(levels)
        self._of_text = [level for level in levels if isinstance(level, ComparesText)]
        self.guards = tuple(guards)
        self.embed = embed
        self.embedder = embedder
        self.plan_guards = tuple(plan_guards)
        self.counts = PartitionCounts()
        self.copied = Copies(store, self.config)
        self._filling = Filling(store)

    def find(self, prepared: Prepared, ask: Ask, *, costs: Costs | None = None) -> Decision:
        """Decides how to run a prompt whose state would be of the epoch `prepared.epoch`.

        costs  what computing and loading take in the engine; None: not known, and the way that reuses most runs

        Never raises for the state of the cache. Raises: ConfigError for a level whose settings are wrong.
        """
        began = time.perf_counter()
        if ask.threshold != prepared.request.threshold:
            prepared = replace(prepared, request=replace(prepared.request, threshold=ask.threshold))
        key, query = self._asked(prepared)
        statuses: dict[str, Status] = {}
        found = self._find(query, key, prepared, ask, statuses)
        config, tokens = self.config, len(prepared.token_ids)
        same = bool(found.donors) and found.donors[0].id == key
        if config.exact_prefix:
            found = replace(found, prefix=self._longest_prefix(prepared, key, found.donors[0] if same else None))
        if not same:
            found = estimated(found, prepared, key, ask, config, self.copied.tokens, exactly=costs is not None)
        plans, considered = choose(
            tokens, found, ask, same=same, min_gain=config.min_gain, share=config.blend.share, most=self._most(ask),
            tail=config.top_layer_tail, costs=costs, guards=self.plan_guards, piece=prepared.piece,
        )  # fmt: skip
        if plans[0].piecewise:
            best = self._with_settings(tokens, plans, costs)
            considered = tuple(best if plan is plans[0] else plan for plan in considered)
            plans = (best, *plans[1:])
        seconds = time.perf_counter() - began
        return Decision(key, tokens, ask, plans, found, query, settled(statuses, plans[0]), seconds, considered)

    def _with_settings(self, tokens: int, plans: Sequence[Plan], costs: Costs | None) -> Plan:
        """A piecewise plan with the settings that an engine needs, and the most rows that it may compute."""
        best, exact, *_ = plans
        most = most_computed(tokens, best, exact, self.config.min_gain, costs)
        return replace(best, config=self.config, most=most)

    def find_again(self, before: Decision, prepared: Prepared, ask: Ask) -> Decision:
        """`find` for a request that was looked up before without the levels: the two count as one lookup."""
        decision, partition = self.find(prepared, ask), prepared.request.partition
        self.counts.take_back(partition, before.plan)
        self.counts.decided(partition, decision)
        return decision

    def exactly(self, prepared: Prepared, *, costs: Costs | None = None) -> Decision:
        """How to compute a prompt exactly, for the cache's own purposes: nothing is compared, and no lookup is counted."""
        key, query = self._asked(prepared)
        found = Found(prefix=self._longest_prefix(prepared, key, None) if self.config.exact_prefix else None)
        plans, considered = choose(len(prepared.token_ids), found, Ask(), costs=costs, piece=prepared.piece)
        return Decision(key, len(prepared.token_ids), Ask(), plans, found, query, {}, considered=considered)

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
        self.copied.remove(donor)
        for level in self.levels:
            level.remove(donor)

    def clear(self, partition: str) -> None:
        """Forgets what was counted of one partition; its chunks leave by `remove`."""
        self.counts.clear(partition)

    def prefixes(self, epoch: str) -> EpochPrefixes:
        """How much of a prompt is a prefix of a stored one."""
        return EpochPrefixes(self.store, epoch)

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

    def _find(self, query: Query, key: str, prepared: Prepared, ask: Ask, statuses: dict[str, Status]) -> Found:
        own = self._of_caller(key, query.request, prepared.epoch)
        if ask.named:
            return self._named(ask, own, prepared)
        if ask.piecewise and ask.similar and own is None:
            copied = self.copied.search(prepared, self._describes(ask, prepared), self._most(ask), ask.threshold)
            if copied is not None:
                statuses["copied"] = "hit" if copied.match else "miss"
                if copied.match is not None:
                    statuses.update(skipped(self.levels))
                    return copied
        if not (ask.similar and ask.levels):
            return Found()

        def known(id: str) -> ChunkMeta | None:
            return self._of_caller(id, prepared.request, prepared.epoch)

        most = self._most(ask)
        found, rows = alike(self.levels, self.guards, query, known, blends=ask.piecewise, most=most, own=own)
        statuses.update(rows)
        return found

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

    def _longest_prefix(
        self, prepared: Prepared, key: str, own: ChunkMeta | None
    ) -> tuple[PrefixHit, ChunkMeta] | None:
        """The longest stored prefix; `own`: the prompt's own chunk, if that was found already."""
        request, ids, spans = prepared.request, prepared.token_ids, prepared.spans
        own = own or self._of_caller(key, request, prepared.epoch)
        if own is not None:
            return PrefixHit(key, len(ids) - 1), own  # the prompt itself: nothing is longer
        return self.store.find(request.partition, prepared.epoch, ids, spans)


def space_of(prepared: Prepared, media: str) -> str:
    """Separates requests that must never match: by partition, epoch and, with `media="exact"`, the media."""
    request = prepared.request
    digests = [item.digest for item in request.media] or [span.digest for span in prepared.spans]
    apart = media_key(digests) if media == "exact" else ("media" if digests else "")
    return digest_of("space", request.partition, prepared.epoch, apart)[:40]
