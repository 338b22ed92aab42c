"""The hierarchical cache: finds what can stand in for a prompt's state, and keeps what was computed.

    Request -> identify -> find (levels) -> judge (guards) -> plan -> [engine] -> record -> store

It knows neither torch nor an engine; `pipeline.Pipeline` puts the two together.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakSet

from dejakv.config import SemanticCacheConfig
from dejakv.costs import Costs
from dejakv.counts import CacheCounts
from dejakv.engines.base import Completion, ComputedRows, FollowsWeights, Prepared
from dejakv.find.ask import Ask
from dejakv.find.candidates import PlanGuard
from dejakv.find.decision import Decision
from dejakv.find.finder import Embed, Finder, no_vectors
from dejakv.find.promotion import Promotions
from dejakv.find.rows import described_rows, rows_lifetime
from dejakv.find.ways import Plan
from dejakv.fusing import Fusing
from dejakv.guards.base import Guard
from dejakv.guards.bounded import Bounded
from dejakv.guards.chain import observe
from dejakv.guards.lexical import QUESTION
from dejakv.identity import check_partition, check_scope
from dejakv.levels.base import Level, Match
from dejakv.records import Record, greedy_note
from dejakv.request import Request
from dejakv.retention import Removals, forget
from dejakv.store.age import now
from dejakv.store.base import Admits, ChunkMeta, Store, Tensor
from dejakv.store.expiry import shortest
from dejakv.store.lineage import DONORS
from dejakv.store.prefix import EpochPrefixes
from dejakv.store.purging import purge
from dejakv.store.selection import Purged, Selection
from dejakv.store.writer import Writer
from dejakv.trust.audits import Audits
from dejakv.trust.differs import differs_of
from dejakv.trust.gate import Gate
from dejakv.trust.report import TrustReport


class HierarchicalCache:
    """A finder over a store, and what fills the store. Thread-safe; partitions and epochs never see each other.

    levels, guards, embed, embedder, plan_guards  see `Finder`
    fusing                           states of the model's fusion modules, if a provider reads them
    gate                             bounds the share of wrong answers among the approximate ones; closed with the cache
    background                       False stores within `record`
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
        fusing: Fusing | None = None,
        gate: Gate | None = None,
        plan_guards: Sequence[PlanGuard] = (),
        background: bool = True,
    ) -> None:
        bounded = Bounded(gate) if gate is not None else None
        self._writer = Writer(store, background=background)
        self.store = self._writer
        self.finder = Finder(
            self.store, levels, guards, config, embed=embed, embedder=embedder, bounded=bounded, plan_guards=plan_guards
        )
        self.config = self.finder.config
        self.gate = gate
        self.audits = Audits[Decision](gate, differs_of(self.config.differs)) if gate is not None else None
        self.fusing = fusing
        self.promotions = Promotions()
        self.removals = Removals()
        self._admits = store if isinstance(store, Admits) else None
        self._served: WeakSet[FollowsWeights] = WeakSet()
        self.store.on_evict(self.finder.remove)
        self.finder.fill()

    def find(self, prepared: Prepared, ask: Ask | None = None, *, costs: Costs | None = None) -> Decision:
        """How to run a prompt; without `ask`, as its request and the settings say. See `Finder.find`."""
        return self.finder.find(prepared, ask or Ask.of(prepared.request, self.config), costs=costs)

    def record(
        self, prepared: Prepared, decision: Decision, ran: Plan, completion: Completion, *, promote: bool = False
    ) -> bool:
        """Keeps what was computed, off the caller's path. True if the prompt's exact state was handed to the writer.

        ran      what was run in the end: the decision's plan, or a plainer one
        promote  a prompt that was answered approximately is to wait in `promotions`, from which the caller takes it

        Of a blended prompt the rows that were computed in every layer are kept, for later blends and nothing else.
        """
        if decision.ask.no_store:
            return False
        if ran.approximate:
            if completion.rows is not None:
                self._keep_rows(prepared, decision.key, completion, completion.rows)
            if promote:
                self.promotions.note(decision.key, prepared, self._lifetime(prepared.request, self.config.ttl_prompts))
            return False
        if ran.method == "exact" or self.store.meta(decision.key) is not None:
            return False
        return self.keep(prepared, decision, completion, answer=completion.text)

    def keep(
        self,
        prepared: Prepared,
        decision: Decision,
        completion: Completion,
        *,
        answer: str | None = None,
        begun: int | None = None,
    ) -> bool:
        """Hands a prompt's exact state to the writer. False if the store does not want it, or there is no room.

        begun  `removals.mark()` at the beginning of what nobody has asked for: after a later removal it is not stored
        """
        tokens, partition = len(prepared.token_ids), prepared.request.partition

        def removed() -> bool:
            return begun is not None and self.removals.since(begun, partition)

        if removed() or not self._wanted(decision.key, tokens, partition):
            return False
        capture = completion.capture
        if completion.shared:
            taken = capture()

            def capture() -> Tensor | None:
                return taken

        asked = self.finder.asked(decision.statuses)
        described = self.describe(prepared, decision, answer=answer, embedded=asked)
        if answer is not None:
            note = greedy_note(prepared.request.sampling, completion.token_ids)
            described = replace(described, metadata={**described.metadata, **note})

        def complete(meta: ChunkMeta) -> ChunkMeta | None:
            if removed():
                return None
            return meta if asked else replace(meta, vectors=dict(self.finder.vectors(decision.query)))

        return self._submit(described, capture, complete, levels=asked)

    def _submit(
        self,
        meta: ChunkMeta,
        capture: Callable[[], Tensor | None],
        complete: Callable[[ChunkMeta], ChunkMeta | None],
        *,
        levels: bool,
    ) -> bool:
        """Hands a chunk to the writer and makes it findable at once; by vectors only if `levels`, else when it is stored."""
        submitted = self._writer.submit(meta, capture, complete=complete, after=self.stored)
        if submitted:
            self._findable(meta, levels=levels)
        return submitted

    def judged(self, request: Request, record: Record, agreed: bool) -> None:
        """Tells the guards whether the answer of an adopted donor was the one that full computation gives. A donor that was
        wrong is not offered again while this cache lives."""
        meta = self.store.meta(record.donor) if record.method == "adopt" and record.donor is not None else None
        if meta is not None:
            observe(self.finder.guards, request, meta, Match(meta.id, record.level, record.score or 0.0), agreed)

    def prefixes(self, epoch: str) -> EpochPrefixes:
        """What `arrange` asks: how much of a prompt is a prefix of one that is stored under this epoch (`engine.epoch`)."""
        return self.finder.prefixes(epoch)

    def _keep_rows(self, prepared: Prepared, key: str, completion: Completion, rows: ComputedRows) -> None:
        """Hands a blend's own rows to the writer, each run as a chunk."""
        partition = prepared.request.partition
        for described in self.describe_rows(prepared, key, rows):
            first, stop = described.position, described.position + described.num_tokens
            if self.store.meta(described.id) is not None or not self._wanted(described.id, stop - first, partition):
                continue
            taken = rows.capture(first, stop) if completion.shared else None
            capture = partial(rows.capture, first, stop) if taken is None else lambda taken=taken: taken
            if self._submit(described, capture, self._with_donors, levels=False):
                self.finder.counts.kept(partition, stop - first)

    def _with_donors(self, meta: ChunkMeta) -> ChunkMeta | None:
        """A description of rows; None if a donor was purged meanwhile, and they would have to leave with it."""
        return None if any(self.store.meta(donor) is None for donor in meta.metadata[DONORS]) else meta

    def _lifetime(self, request: Request, own: float | None) -> float:
        """Seconds for which what is kept of a request may be used: its own choice can only shorten the settings'."""
        return shortest(request.ttl, self.config.lifetime(own))

    def _wanted(self, id: str, tokens: int, partition: str) -> bool:
        """Whether the store takes such a chunk: asked before the state is copied out of the engine."""
        return self._admits is None or self._admits.wants(id, tokens, partition)

    def describe(
        self, prepared: Prepared, decision: Decision, *, answer: str | None = None, embedded: bool = True
    ) -> ChunkMeta:
        """The description under which a prompt's exact state is stored; without vectors unless `embedded`."""
        request = prepared.request
        return ChunkMeta(
            id=decision.key,
            partition=request.partition,
            epoch=prepared.epoch,
            token_ids=prepared.token_ids,
            prompt=request.prompt,
            chunk=request.chunk,
            space=decision.query.space,
            spans=prepared.spans,
            embedder=self.finder.embedder,
            vectors=dict(self.finder.vectors(decision.query)) if embedded else {},
            answer=answer,
            created=now(),
            ttl=self._lifetime(request, self.config.ttl_prompts),
            metadata={"request": request.id} | ({QUESTION: request.question} if request.question else {}),
        )

    def describe_rows(self, prepared: Prepared, key: str, rows: ComputedRows) -> list[ChunkMeta]:
        """The same of a blend's own rows, one for each run; none if too much approximate state went into them."""
        if rows.generation > self.config.max_generation:
            return []
        ttl = rows_lifetime(self.store, rows, self._lifetime(prepared.request, self.config.ttl_rows))
        return [described_rows(prepared, key, rows, first, stop, ttl) for first, stop in rows.runs]

    def stored(self, meta: ChunkMeta) -> None:
        """Makes a chunk findable that is in the store."""
        self._findable(meta, levels=True)

    def _findable(self, meta: ChunkMeta, *, levels: bool) -> None:
        self.promotions.forget(meta.id)
        self.finder.add(meta, levels=levels)
        if self.store.meta(meta.id) is None:  # evicted or cleared while it was indexed
            self.finder.remove(meta.id)

    def serves(self, engine: FollowsWeights) -> None:
        """Notes an engine whose state is kept here, for as long as it lives."""
        self._served.add(engine)

    def weights_changed(self) -> None:
        """Has every engine served from here fingerprint its model anew (docs/exactness.md)."""
        for engine in list(self._served):
            engine.weights_changed()

    def stats(self, partition: str | None) -> CacheCounts:
        """A copy of one partition's counters; None sums over all, for the operator of the process."""
        check_scope(partition)
        return self.finder.counts.of(partition)

    def trust(self, partition: str | None) -> TrustReport | None:
        """What is known of the error bound in one partition, in its group if it shares evidence; None for all, for the operator.
        None without a bound, and while the evidence cannot be read, which the log tells."""
        check_scope(partition)
        return self.gate.known(partition) if self.gate is not None else None

    def clear(self, partition: str) -> int:
        """Removes one partition's chunks; how many there were."""
        check_partition(partition)
        self.removals.note(partition)
        self.store.flush()
        removed = self.store.clear(partition)
        self.finder.clear(partition)
        self._forget(partition)
        return removed

    def _forget(self, partition: str | None) -> None:
        forget((*self.finder.levels, *self.finder.guards), partition)
        self.promotions.clear(partition)
        if self.audits is not None:
            self.audits.clear(partition)

    def purge(self, selection: Selection, *, dry_run: bool = False) -> Purged:
        """Removes the selected entries with everything that was made from them, until no byte of them is left; what was removed.

        selection  see `Selection`
        dry_run    removes nothing, and tells what would be

        Prompts that were answered by adopting a donor left no state. A request that is running finishes, and its state is
        stored afterwards; rows of a blend only while all its donors are there. What idle time is computing is not stored.
        Raises: StoreError if entries or their traces could not be removed.
        """
        check_scope(selection.partition)
        if not dry_run:
            self.removals.note(selection.partition)
        self.store.flush()
        purged = purge(self.store, selection, dry_run=dry_run)
        if not dry_run:
            self._forget(selection.partition)
            self.store.flush()  # what was being written from an entry as it was removed
            if purged.ids:
                purged += purge(self.store, Selection(selection.partition, donors=tuple(purged.ids)))
        if self.fusing is not None:
            purged += self.fusing.purge(selection.of_others(purged), dry_run=dry_run)
        return purged

    @property
    def embed_counts(self) -> dict[str, int]:
        """How often the embedding hook gave vectors and why it did not, if it counts."""
        return dict(getattr(self.finder.embed, "counts", {}))

    def flush(self) -> None:
        """Waits until everything handed over is stored and can be found."""
        self.store.flush()

    def close(self) -> None:
        """Finishes the saves and closes the store. What waits to be labelled is lost."""
        if self.audits is not None:
            self.audits.close()
        if self.gate is not None:
            self.gate.close()
        self.store.close()
        if self.fusing is not None:
            self.fusing.close()
        self.finder.close()
