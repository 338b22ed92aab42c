"""The hierarchical cache: find a donor, let the guards judge it, plan the reuse, and keep what was computed.

    Request -> identify -> find (levels) -> judge (guards) -> plan -> [engine] -> record -> store

It knows neither torch nor an engine; `pipeline.Pipeline` puts the two together.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from dejakv.config import SemanticCacheConfig
from dejakv.counts import CacheCounts, PartitionCounts
from dejakv.engines.base import Completion, Prepared
from dejakv.errors import ConfigError
from dejakv.guards.base import Guard, Verdict
from dejakv.guards.chain import judge
from dejakv.identity import check_partition, digest_of, exact_key, media_key
from dejakv.levels.base import Level, Match, Query, Status, Vectors
from dejakv.lookup import Lookup, asked_of, own_first
from dejakv.planner import Plan, plan
from dejakv.prefix import PrefixHit, PrefixIndex
from dejakv.promotion import Promotions
from dejakv.request import Request
from dejakv.store.base import Chunk, ChunkMeta, Store, Tensor
from dejakv.store.writer import Writer

Embed = Callable[[Request], Vectors]


def _no_vectors(_: Request) -> Vectors:
    return {}


class HierarchicalCache:
    """Levels, guards and planner over one store. Thread-safe; partitions and epochs never see each other.

    levels   tried in order; the first whose donor passes the guards wins
    guards   asked for whatever is not exact
    embed    computes the latent layers' vectors of a request, called only when a latent level asks
    embedder fingerprint of whatever makes vectors; stored vectors of another embedder are not used
    """

    def __init__(
        self,
        store: Store,
        levels: Sequence[Level] = (),
        guards: Sequence[Guard] = (),
        config: SemanticCacheConfig | None = None,
        *,
        embed: Embed | None = None,
        embedder: str = "",
        background: bool = True,
    ) -> None:
        self.config = config or SemanticCacheConfig()
        self.store = store
        self.levels = tuple(levels)
        self.guards = tuple(guards)
        self.embedder = embedder
        self._embed = embed or _no_vectors
        self._prefix = PrefixIndex(store)
        self.promotions = Promotions()
        self._counts = PartitionCounts()
        self._served: WeakSet[Any] = WeakSet()
        self._writer = Writer(store, background=background)
        store.on_evict(self._forget)
        for meta in store.metas():
            self._index(meta)

    def lookup(self, prepared: Prepared, epoch: str) -> Lookup:
        """Finds the exact prefix and the best trusted donor. Never raises for the state of the cache."""
        began = time.perf_counter()
        request = prepared.request
        digests = [span.digest for span in prepared.spans]
        key = exact_key(request.partition, epoch, prepared.token_ids, digests)
        query = Query(request, self.space(request, epoch), lambda: self._embed(request))
        statuses: dict[str, Status] = {}
        match, donors, verdicts = self._find(query, key, epoch, statuses)
        prefix = self._find_prefix(request.partition, epoch, prepared) if self.config.exact_prefix else None
        statuses["kv_cache"] = "hit" if match or prefix else "miss"
        self._counts.lookup(request.partition, verdicts)
        return Lookup(key, query, prefix, match, donors, statuses, tuple(verdicts), seconds=time.perf_counter() - began)

    def plan(self, prepared: Prepared, lookup: Lookup) -> Plan:
        """How to run it. A request that was served approximately before runs exactly now, and is stored then."""
        chosen = self._plan(prepared, lookup)
        self._counts.planned(prepared.request.partition, chosen.match, chosen.method == "prefix")
        return chosen

    def _plan(self, prepared: Prepared, lookup: Lookup) -> Plan:
        config = self.config
        tokens = len(prepared.token_ids)
        same = bool(lookup.donors) and lookup.donors[0].id == lookup.key
        asked = asked_of(prepared.request, config)
        refused = ""
        if lookup.match is None and lookup.verdicts:
            last = next((v for v in lookup.verdicts if v.decision == "reject"), lookup.verdicts[-1])
            refused = f"{last.guard}: {last.reason}"
        if asked != "exact" and not same and self.promotions.due(lookup.key):
            self._counts.promotion(prepared.request.partition)
            reason = "promoted: served approximately before, exact from now on"
            return replace(self.exact_plan(prepared, lookup), reason=reason)
        return plan(
            tokens,
            lookup.prefix,
            lookup.match,
            lookup.donors,
            same=same,
            asked=asked,
            min_gain=config.min_gain,
            share=config.blend.share,
            refused=refused,
        )

    @staticmethod
    def exact_plan(prepared: Prepared, lookup: Lookup) -> Plan:
        """The longest exact prefix, or nothing: what may always be run."""
        tokens = len(prepared.token_ids)
        return plan(tokens, lookup.prefix, None, (), same=False, asked="exact", min_gain=0)

    def record(self, prepared: Prepared, lookup: Lookup, chosen: Plan, completion: Completion, epoch: str) -> bool:
        """Keeps what was computed, off the caller's path. True if it was handed to the writer.

        State made from an approximate plan is never kept; the prompt is remembered and runs exactly when it comes again.
        """
        if chosen.approximate:
            self.promotions.note(lookup.key, prepared.request.partition)
            return False
        if chosen.method == "exact" or self.store.meta(lookup.key) is not None:
            return False
        wants = getattr(self.store, "wants", None)
        if wants is not None and not wants(lookup.key, len(prepared.token_ids), prepared.request.partition):
            return False  # asked before the state is copied out of the engine
        request = prepared.request
        capture = completion.capture
        if completion.shared:
            taken = capture()

            def capture() -> Tensor | None:
                return taken

        def make() -> Chunk | None:
            tensor = capture()
            if tensor is None:
                return None
            meta = ChunkMeta(
                id=lookup.key,
                partition=request.partition,
                epoch=epoch,
                token_ids=prepared.token_ids,
                prompt=request.prompt,
                chunk=request.chunk,
                space=lookup.query.space,
                spans=prepared.spans,
                embedder=self.embedder,
                vectors=self._vectors(lookup.query),
                answer=completion.text,
                created=time.time(),
                nbytes=tensor.nbytes,
                metadata={"request": request.id},
            )
            return Chunk(meta, tensor)

        return self._writer.submit(make, after=self._stored)

    def space(self, request: Request, epoch: str) -> str:
        """What separates requests that must never match."""
        media = media_key(request.media) if self.config.media == "exact" else ("media" if request.media else "")
        return digest_of("space", request.partition, epoch, media)[:40]

    def serves(self, engine: Any) -> None:
        """Notes an engine whose state is kept here, for as long as it lives; it has a method `weights_changed`."""
        self._served.add(engine)

    def weights_changed(self) -> None:
        """Has every engine served from here fingerprint its model anew: nothing computed before is used for a changed one.

        Needed only after changes that are not noticed at once (docs/exactness.md).
        """
        for engine in list(self._served):
            engine.weights_changed()

    def stats(self, partition: str | None) -> CacheCounts:
        """A copy of one partition's counters; None sums over all, for the operator of the process."""
        if partition is not None:
            check_partition(partition)
        return self._counts.of(partition)

    def clear(self, partition: str) -> int:
        """Removes one partition's chunks; how many there were."""
        check_partition(partition)
        self._writer.flush()
        removed = self.store.clear(partition)
        self._counts.clear(partition)
        self.promotions.clear(partition)
        return removed

    @property
    def embed_counts(self) -> dict[str, int]:
        """How often the embedding hook gave vectors and why it did not, if it counts."""
        return dict(getattr(self._embed, "counts", {}))

    def flush(self) -> None:
        """Waits until everything handed over is stored and can be found."""
        self._writer.flush()
        self.store.flush()

    def close(self) -> None:
        """Finishes the saves and closes the store."""
        self._writer.close()
        self.store.close()

    def _find(
        self, query: Query, key: str, epoch: str, statuses: dict[str, Status]
    ) -> tuple[Match | None, tuple[ChunkMeta, ...], list[Verdict]]:
        verdicts: list[Verdict] = []
        found: Match | None = None
        donors: list[ChunkMeta] = []
        asked = asked_of(query.request, self.config)
        wanted = self.config.blend_donors if asked == "blend" else 1
        guards = [g for g in self.guards if asked != "blend" or not getattr(g, "waived_for_blend", False)]
        own = self.store.meta(key) is not None
        for level in self.levels:
            if found is not None:
                self._skip(level, statuses)
                continue
            try:
                search = level.search(query)
            except ConfigError:
                raise  # a setting is wrong, and its message says which
            except Exception as error:  # a level may be foreign code: its failure costs its own hits
                statuses[level.name] = "skip"
                verdicts.append(Verdict("reject", level.name, f"the level failed: {type(error).__name__}: {error}"))
                continue
            statuses.update(search.statuses)
            for match in own_first(search.matches, key, own):
                meta = self.store.meta(match.donor)
                if meta is None or meta.partition != query.request.partition or meta.epoch != epoch:
                    continue
                if meta.id != key:
                    verdict = judge(guards, query.request, meta, match)
                    verdicts.append(verdict)
                    if verdict.decision != "accept":
                        continue
                found = found or match
                donors.append(meta)
                if len(donors) >= wanted or meta.id == key:
                    break
            if found is None and search.matches:
                statuses.update({name: "miss" for name, status in search.statuses.items() if status == "hit"})
        return found, tuple(donors), verdicts

    @staticmethod
    def _skip(level: Level, statuses: dict[str, Status]) -> None:
        names: Sequence[str] = getattr(level, "status_names", (level.name,))
        for name in names:
            statuses.setdefault(name, "skip")

    def _find_prefix(self, partition: str, epoch: str, prepared: Prepared) -> tuple[PrefixHit, ChunkMeta] | None:
        hit = self._prefix.longest(partition, epoch, prepared.token_ids, prepared.spans)
        meta = self.store.meta(hit.donor) if hit else None
        return (hit, meta) if hit and meta else None

    def _vectors(self, query: Query) -> Vectors:
        vectors = dict(query.vectors)
        for level in self.levels:
            vector_of = getattr(level, "vector", None)
            if vector_of is not None:
                text = vector_of(query.text, query.request.partition)
                if text is not None:
                    vectors["text"] = text
        return vectors

    def _stored(self, meta: ChunkMeta) -> None:
        self._index(meta)
        if self.store.meta(meta.id) is None:  # evicted or cleared while it was indexed
            self._forget(meta.id)

    def _index(self, meta: ChunkMeta) -> None:
        if meta.kind != "kv":
            return
        request = Request(id="", prompt=meta.prompt, chunk=meta.chunk, partition=meta.partition)
        known = meta.embedder == self.embedder
        query = Query(request, meta.space, lambda: meta.vectors if known else _no_vectors(request))
        self._prefix.add(meta)
        for level in self.levels:
            level.add(meta.id, query)

    def _forget(self, donor: str) -> None:
        self._prefix.remove(donor)
        for level in self.levels:
            level.remove(donor)
