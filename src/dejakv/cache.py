"""Hierarchical cache: finds reusable state for a prompt, and stores newly computed state.

    Prepared -> find (levels) -> judge (guards) -> Decision(plans) -> [engine] -> keep -> store

Free of torch; `pipeline.Pipeline` adds an engine.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakSet

from dejakv.config import SemanticCacheConfig, switched_off
from dejakv.decide.answers import answer_note
from dejakv.decide.bound import CertifiedObserver, ErrorBound
from dejakv.decide.costs import ReuseCosts
from dejakv.decide.counts import CacheCounts
from dejakv.decide.finder import DonorFinder, Embed, EpochPrefixes, no_vectors
from dejakv.decide.guards.base import Guard
from dejakv.decide.levels.base import Level
from dejakv.decide.levels.fusion import FusionStates
from dejakv.decide.plan import Decision, Observer, Plan, ReuseRequest
from dejakv.decide.queue import SettlingQueue
from dejakv.engines.base import Completion, ComputedRows, Engine, Prepared
from dejakv.errors import ModelError
from dejakv.identity import check_partition, check_scope, digest_of, rows_key
from dejakv.store.base import INT8, ROWS, ChunkMeta, Tensor
from dejakv.store.budgets import now, remaining, shortest
from dejakv.store.selection import DONORS, PROMPT, PurgeResult, Selection
from dejakv.store.store import Store
from dejakv.trust.differs import differs_of
from dejakv.trust.gate import TrustGate
from dejakv.trust.report import TrustReport

log = logging.getLogger("dejakv")


class HierarchicalCache:
    """Finds donors in a store, and fills it. Thread-safe; partitions and epochs never see each other.

    levels, guards, embed, embedder  see `DonorFinder`
    fusion      states of the model's fusion modules, if a provider reads them
    gate        bound on the share of wrong approximate answers; closed with the cache
    background  store and index in the background: exact prefixes are found at once, other donors later (`flush` waits);
                False: store within `keep`, and index before the constructor returns
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
        fusion: FusionStates | None = None,
        gate: TrustGate | None = None,
        background: bool = True,
    ) -> None:
        self.store = store
        self._background = background
        self.off = switched_off()
        if self.off:
            log.warning("%s: nothing is reused or stored", self.off)

        self.finder = DonorFinder(
            store,
            levels,
            guards,
            config,
            embed=embed,
            embedder=embedder,
            background=background,
        )

        self.config = self.finder.config
        self.gate = gate
        self.queue = SettlingQueue(gate, differs_of(self.config.differs) if gate is not None else None)
        self.fusion = fusion
        self.observers: list[Observer] = [*([fusion] if fusion is not None else [])]
        if gate is not None:
            # Before fusion states, which act on the plan that is left.
            self.observers.insert(0, ErrorBound(gate, self.config, self.queue))
        if self.config.certificate is not None:
            self.observers.insert(0, CertifiedObserver(self.config))
        self._served: WeakSet[Engine] = WeakSet()
        # Before the filling: what leaves meanwhile must not stay in an index.
        self.store.on_evict(self.finder.remove)
        self.store.on_arrival(self._found)
        self.finder.fill()

    def decide(self, prepared: Prepared, engine: Engine) -> Decision:
        """Decide how an engine runs a prompt, by its request and the settings."""
        costs = self.costs(engine)
        generation = engine.generation if self.config.answers == "keep" else ""
        ask = ReuseRequest.of(prepared.request, self.config, donors=engine.most_donors, generation=generation)
        if engine.tells_first_token and prepared.request.sampling.num_beams == 1:
            ask = replace(ask, tells_first_token=True)
        return self.find(prepared, ask, costs=costs)

    def costs(self, engine: Engine, *, timed: bool = True) -> ReuseCosts | None:
        """Costs of an engine's work: the setting `costs`, else `Engine.costs`; None: unknown."""
        fixed = self.config.costs
        costs = engine.costs(timed=timed and not fixed)
        return costs.fixed(fixed) if fixed and costs is not None else costs

    def find(self, prepared: Prepared, ask: ReuseRequest | None = None, *, costs: ReuseCosts | None = None) -> Decision:
        """Decide without an engine. `ask` defaults to the request and the settings. See `DonorFinder.decide`."""
        if self.off:
            return self.finder.fully(prepared, self.off)
        decision = self.finder.decide(prepared, ask or ReuseRequest.of(prepared.request, self.config), costs=costs)
        if self.config.enable_fusion_cache:
            decision = replace(decision, statuses={**decision.statuses, "fusion": "skip"})
        for observer in self.observers:
            decision = observer.decided(prepared, decision)
        self.finder.counts.decided(prepared.request.partition, decision)
        return decision

    def exactly(self, prepared: Prepared, engine: Engine) -> Decision:
        """Decide how to compute a prompt exactly, for internal use: without comparison, and without counting a lookup."""
        return self.finder.exactly(prepared, costs=self.costs(engine))

    def keep(self, prepared: Prepared, decision: Decision, plan: Plan, completion: Completion) -> bool:
        """Store the state of an answered prompt, in the background. True if its exact state was queued.

        plan  the plan that ran

        After a blend, only rows computed in every layer are stored, for later blends alone; with `kv_quantization` nothing else ever is.
        """
        if self.off:
            return False
        for observer in self.observers:
            observer.answered(prepared, decision, plan, completion)

        if decision.ask.no_store or plan.method == "exact":
            return False
        if plan.approximate:
            self._keep_rows(decision, completion)
            return False
        return self.keep_exact(decision, completion, answer=completion.text) and not self.config.quantizes

    def keep_exact(
        self, decision: Decision, completion: Completion, *, answer: str | None = None, removal_mark: int | None = None
    ) -> bool:
        """Queue a prompt's exact state for storage, with `kv_quantization` in 8 bits. False if it is stored already, unwanted, or the queue is
        full.

        removal_mark  `queue.mark()` at the start of work in idle time: after a later removal the state is not stored
        """
        query, has_vectors = decision.query, self.finder.asked(decision.statuses)
        entry = replace(decision.entry, answer=answer, created=now())
        if self.config.quantizes:
            entry = in_8_bits(entry)
        if has_vectors:
            entry = replace(entry, vectors=dict(self.finder.vectors(query)))
        if answer is not None and self.config.answers == "keep":
            note = answer_note(decision.ask.answers, completion.token_ids, completion.arithmetic, completion.bitwise)
            entry = replace(entry, metadata={**entry.metadata, **note})

        def removed() -> bool:
            return removal_mark is not None and self.queue.removed_since(removal_mark, entry.partition)

        def complete(meta: ChunkMeta) -> ChunkMeta | None:
            if removed():
                return None
            # In the worker's thread: embedding costs no answer any time.
            return meta if has_vectors else replace(meta, vectors=dict(self.finder.vectors(query)))

        return not removed() and self._submit(
            entry, completion.capture, complete, completion.shared, levels=has_vectors
        )

    def _submit(
        self,
        meta: ChunkMeta,
        capture: Callable[[], Tensor | None],
        complete: Callable[[ChunkMeta], ChunkMeta | None],
        at_once: bool,
        *,
        levels: bool = False,
    ) -> bool:
        """Queue a chunk and make it findable at once; by vectors only with `levels`, else after it is stored."""
        background, after = self._background, self.finder.add
        submitted = self.store.submit(
            meta, capture, complete=complete, after=after, at_once=at_once, background=background
        )
        # Already now: the next request may be the same prompt.
        if submitted:
            self.finder.add(meta, levels=levels)
        return submitted

    def prefixes(self, epoch: str) -> EpochPrefixes:
        """Stored prefixes under an epoch (`engine.epoch`), for `arrange`."""
        return EpochPrefixes(self.store, epoch)

    def _keep_rows(self, decision: Decision, completion: Completion) -> None:
        """Queue a blend's own rows for storage, each run as a chunk."""
        rows, queued_tokens = completion.rows, 0
        if rows is None:
            return
        for meta in self.describe_rows(decision.entry, rows, decision.query.request.ttl):
            capture = partial(rows.capture, meta.position, meta.position + meta.num_tokens)
            if self._submit(meta, capture, self._with_donors, completion.shared):
                queued_tokens += meta.num_tokens
        if queued_tokens:
            self.finder.counts.add(decision.entry.partition, CacheCounts(rows_kept=queued_tokens))

    def _with_donors(self, meta: ChunkMeta) -> ChunkMeta | None:
        """Description of rows, None if a donor was purged meanwhile: its rows leave with it."""
        return None if any(self.store.meta(donor) is None for donor in meta.metadata[DONORS]) else meta

    def describe_rows(self, entry: ChunkMeta, rows: ComputedRows, ttl: float | None = None) -> list[ChunkMeta]:
        """Describe a blend's own rows, one description a run; none beyond `max_generation`.

        entry  `Decision.entry` of the blended prompt
        ttl    limit of the request, in seconds

        Rows expire no later than any donor they attended to.
        """
        if rows.generation > self.config.max_generation:
            return []

        donors = [meta for meta in map(self.store.meta, rows.donors) if meta is not None]
        lives = (ttl, self.config.lifetime(self.config.ttl_rows), *(remaining(meta, now()) for meta in donors))
        kind = INT8 if self.config.quantizes else ROWS
        return [described_rows(entry, rows, first, stop, shortest(*lives), kind) for first, stop in rows.runs]

    def serves(self, engine: Engine) -> None:
        """Register an engine, weakly; measure its costs and prepare it for the method of reuse before the first request.

        Raises: ModelError if `top_layer` is set and unsupported by engine or model.
        """
        check_top_layer(engine, self.config)
        self._served.add(engine)
        self.costs(engine)
        engine.get_ready(ReuseRequest(self.config.reuse).method)

    def weights_changed(self) -> None:
        """Let every registered engine fingerprint its model again (docs/explanation/exactness.md)."""
        for engine in list(self._served):
            engine.weights_changed()

    def stats(self, partition: str | None) -> CacheCounts:
        """Copy of a partition's counters; None sums over all, for the operator of the process. Raises: InputError for an invalid
        partition."""
        check_scope(partition)
        counts = self.finder.counts.of(partition)
        if partition is None:  # the operator's series begin with 0
            for level in self.finder.level_names:
                counts.hits.setdefault(level, 0)
            for guard in self.finder.guards:
                counts.rejections.setdefault(guard.name, 0)
        return counts

    def trust(self, partition: str | None) -> TrustReport | None:
        """Report on the error bound of a partition (of its group, if it shares evidence), or of all (None, for the operator).
        None without a bound, and while the evidence cannot be read, which is logged.
        """
        check_scope(partition)
        return self.gate.known(partition) if self.gate is not None else None

    def clear(self, partition: str) -> int:
        """Remove a partition's entries (see `purge`) and counters, and return their number. Raises: StoreError."""
        check_partition(partition)
        purged = self.purge(Selection(partition))
        self.finder.counts.clear(partition)
        return len(purged.ids)

    def _found(self, id: str) -> None:
        """Another machine stored it."""
        meta = self.store.meta(id)
        if meta is not None:
            self.finder.add(meta)

    def purge(self, selection: Selection, *, dry_run: bool = False) -> PurgeResult:
        """Remove the selected entries and everything derived from them, to the last byte. Returns what was removed.

        dry_run  report without removing

        Adopted prompts left no state. A running request finishes and is stored afterwards; rows of a blend only while all donors
        remain. Work in idle time is not stored. Raises: StoreError if entries or traces remain.
        """
        check_scope(selection.partition)
        if not dry_run:
            # First: from here on nothing begun in idle time is stored.
            self.queue.removing(selection.partition)
        self.store.flush()
        purged = self.store.purge(selection, dry_run=dry_run)
        if not dry_run:
            self.queue.clear(selection.partition)
            self.store.flush()  # what was being written from an entry as it was removed
            if purged.ids:
                # By id: what was made from a purged entry meanwhile names it as a donor.
                purged += self.store.purge(Selection(selection.partition, donors=tuple(purged.ids)))

        if self.fusion is not None:
            purged += self.fusion.store.purge(selection.of_others(purged), dry_run=dry_run)
        return purged

    @property
    def embed_counts(self) -> dict[str, int]:
        """Counts of the embedding hook's vectors and failures, if it counts."""
        return dict(getattr(self.finder.embed, "counts", {}))

    def flush(self) -> None:
        """Wait until everything queued is stored and can be found."""
        self.store.flush()
        self.finder.wait()

    def close(self) -> None:
        """Finish the saves and close the store. Waiting labels are lost."""
        # Before the gate, which is told of the waiting labels that are lost.
        self.queue.close()
        if self.gate is not None:
            self.gate.close()
        # Its thread reads the store, which is closed next.
        self.finder.stop()
        self.store.close()
        if self.fusion is not None:
            self.fusion.store.close()


def in_8_bits(entry: ChunkMeta) -> ChunkMeta:
    """Describe a prompt's state in 8 bits. It has another id than the exact state, and its rounding is a first generation."""
    key = digest_of(INT8, entry.id)[:40]
    return replace(entry, id=key, kind=INT8, generation=1, metadata={**entry.metadata, PROMPT: entry.id})


def described_rows(
    entry: ChunkMeta, rows: ComputedRows, first: int, stop: int, ttl: float = 0.0, kind: str = ROWS
) -> ChunkMeta:
    """Describe rows `first` to `stop - 1` of a blended prompt, to store them. `entry`: see `Decision`; `kind`, `ttl`: see `ChunkMeta`.

    Without prompt and chunk, so no level compares them; without spans, since runs hold no media.
    """
    token_ids = entry.token_ids[first:stop]
    return ChunkMeta(
        id=rows_key(entry.partition, entry.epoch, token_ids, first, rows.generation, entry.id, rows.donors),
        partition=entry.partition,
        epoch=entry.epoch,
        token_ids=token_ids,
        prompt="",
        chunk="",
        kind=kind,
        created=now(),
        metadata={"request": entry.metadata["request"], PROMPT: entry.id, DONORS: list(rows.donors)},
        position=first,
        generation=rows.generation,
        ttl=ttl,
    )


def check_top_layer(engine: Engine, config: SemanticCacheConfig) -> None:
    """Raises: ModelError if `top_layer` is set and unsupported by engine or model."""
    reason = engine.no_top_layer() if config.reuse == "top_layer" else ""
    if reason:
        raise ModelError(
            f"reuse=top_layer: {reason}. Use a layer-condensed model (docs-lckv is bundled), or reuse=blend for this one"
        )
