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
from dejakv.decide.method import method_named, method_of
from dejakv.decide.plan import Decision, Plan, RequestObserver, ReuseRequest, StoringObserver
from dejakv.decide.queue import SettlingQueue
from dejakv.engines.base import Completion, ComputedRows, Engine, Prepared
from dejakv.errors import ModelError
from dejakv.identity import check_partition, check_scope, exact_key, rows_key
from dejakv.store.base import ROWS, SAVED_TOKENS, SNAPSHOT, RawTensor, StateInfo
from dejakv.store.budgets import now, remaining_seconds, shortest_lifetime
from dejakv.store.prefix_keys import PrefixKeys, snapshot_id
from dejakv.store.selection import DONORS, PROMPT, PurgeResult, Selection
from dejakv.store.store import Store
from dejakv.trust.differs import differs_of
from dejakv.trust.gate import TrustGate
from dejakv.trust.report import TrustReport

log = logging.getLogger("dejakv")

NO_CACHE = "the request asks for no_cache"
"""Reason of full computation."""


def describe_snapshot(entry: StateInfo, tokens: int, key: bytes, saved_tokens: int) -> StateInfo:
    """Describe the fixed state behind a prompt's first `tokens` tokens for the store.

    Parameters
    ----------
    entry : StateInfo
        Description of the prompt, with which the snapshot leaves.
    tokens : int
        Number of tokens.
    key : bytes
        Key of the prefix of so many tokens.
    saved_tokens : int
        Tokens between it and the snapshot before it.
    """
    return StateInfo(
        snapshot_id(tokens, key), entry.partition, entry.epoch, (), "", "", kind=SNAPSHOT,
        created=now(), metadata={PROMPT: entry.id, SAVED_TOKENS: saved_tokens}, ttl=entry.ttl,
        position=tokens,
    )  # fmt: skip


class HierarchicalCache:
    """Finds donors in a store, and fills it.

    It is thread-safe. Partitions and epochs never see each other.

    Parameters
    ----------
    store : Store
        Store of the state; closed with the cache.
    levels : Sequence[Level]
        Levels in the order of asking. The first with an accepted donor wins.
    guards : Sequence[Guard]
        Judges of every donor that is not exact.
    config : SemanticCacheConfig or None
        Settings; None for the defaults.
    embed : Embed
        Computes the latent layers' vectors of a request when a latent level needs them.
    embedder : str
        Fingerprint of the vectors' embedder. Stored vectors of others are ignored.
    fusion : StoringObserver or None
        States of the model's fusion modules, if a provider reads them.
    gate : TrustGate or None
        Bound on the share of wrong approximate answers; closed with the cache.
    background : bool
        True stores and indexes in the background: exact prefixes can be used at once, other donors
        later (`flush` waits). False stores within `keep`, and indexes before the constructor
        returns.

    Raises
    ------
    ConfigError
        `DEJAKV_OFF` is neither 0 nor 1.
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
        fusion: StoringObserver | None = None,
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
        self.queue = SettlingQueue(
            gate, differs_of(self.config.differs) if gate is not None else None
        )
        self.fusion = fusion
        self.observers: list[RequestObserver] = [*([fusion] if fusion is not None else [])]
        if gate is not None:
            # Before fusion states, which act on the plan that is left.
            self.observers.insert(0, ErrorBound(gate, self.config, self.queue))
        if self.config.certificate is not None:
            self.observers.insert(0, CertifiedObserver(self.config))

        self._served: WeakSet[Engine] = WeakSet()
        # Before the filling: what leaves meanwhile must not stay in an index.
        self.store.listen(removed=self.finder.remove, arrived=self._on_arrival)
        self.finder.fill()

    @property
    def keeps_answers(self) -> bool:
        """Whether the state of answers is stored."""
        return self.config.generated_text == "keep"

    def decide(self, prepared: Prepared, engine: Engine) -> Decision:
        """Decide how an engine runs a prompt, by its request and the settings.

        Parameters
        ----------
        prepared : Prepared
            The tokenized request, with the epoch of the state to use.
        engine : Engine
            Engine that will run the prompt.

        Returns
        -------
        Decision
            Plans that may run, best first, and the search behind them.
        """
        costs = self.costs(engine)
        generation = engine.generation if self.config.answers == "keep" else ""
        ask = ReuseRequest.from_request(
            prepared.request, self.config, donors=engine.max_donors, generation=generation
        )
        # With beams no first token is known before the search ends.
        if engine.tells_first_token and prepared.request.sampling.num_beams == 1:
            ask = replace(ask, tells_first_token=True)
        return self.find(prepared, ask, costs=costs)

    def costs(self, engine: Engine, *, timed: bool = True) -> ReuseCosts | None:
        """Return the costs of an engine's work; None if they are unknown.

        They are `Engine.costs`, with the constants of the setting `costs` if there are any.

        Parameters
        ----------
        engine : Engine
            Engine whose work is priced.
        timed : bool
            False runs nothing on the model; see `Engine.costs`.

        Returns
        -------
        ReuseCosts or None
            Seconds of a row, of an attended pair, of a loaded byte and of blending; or None.
        """
        fixed = self.config.costs
        costs = engine.costs(timed=timed and not fixed)
        return costs.fixed(fixed) if fixed and costs is not None else costs

    def find(
        self,
        prepared: Prepared,
        ask: ReuseRequest | None = None,
        *,
        costs: ReuseCosts | None = None,
    ) -> Decision:
        """Decide without an engine, and count the lookup; see `DonorFinder.decide`.

        The observers review the decision. While the cache is switched off, and where the request
        says `no_cache`, the prompt is computed in full.

        Parameters
        ----------
        prepared : Prepared
            The tokenized request, with the epoch of the state to use.
        ask : ReuseRequest or None
            What is asked for; by default the request's wishes and the settings.
        costs : ReuseCosts or None
            Costs of the engine that will run the prompt, if they are known.

        Returns
        -------
        Decision
            Plans that may run, best first, and the search behind them.

        Raises
        ------
        ConfigError
            A level has wrong settings, or the method that is asked for is unknown.
        """
        if reason := self.off or (NO_CACHE if prepared.request.no_cache else ""):
            return self.finder.decide_full(prepared, reason)

        decision = self.finder.decide(
            prepared, ask or ReuseRequest.from_request(prepared.request, self.config), costs=costs
        )
        if self.config.enable_fusion_cache:
            decision = replace(decision, statuses={**decision.statuses, "fusion": "skip"})
        for observer in self.observers:
            decision = observer.review_decision(prepared, decision)

        self.finder.counts.count_decision(prepared.request.partition, decision)
        return decision

    def decide_exact(self, prepared: Prepared, engine: Engine) -> Decision:
        """Decide how to compute a prompt exactly, for internal use.

        No donor is compared, and no lookup is counted.

        Parameters
        ----------
        prepared : Prepared
            The tokenized request, with the epoch of the state to use.
        engine : Engine
            Engine that will run the prompt.

        Returns
        -------
        Decision
            Plans of exact methods alone, best first.
        """
        return self.finder.decide_exact(prepared, costs=self.costs(engine))

    def keep(
        self, prepared: Prepared, decision: Decision, plan: Plan, completion: Completion
    ) -> bool:
        """Tell the observers of an answer, and queue its prompt's state for storage.

        After a blend, only rows computed in every layer are stored, for later blends alone. With
        `generated_text="keep"` the state of an exact answer is queued, too.

        Parameters
        ----------
        prepared : Prepared
            The tokenized request.
        decision : Decision
            Decision on the prompt.
        plan : Plan
            The plan that ran.
        completion : Completion
            The engine's result.

        Returns
        -------
        bool
            Whether the prompt's exact state was queued.
        """
        if self.off:
            return False
        for observer in self.observers:
            observer.observe_answer(prepared, decision, plan, completion)

        if decision.ask.no_store:
            return False
        if plan.approximate:
            if method_of(plan).keeps_rows:
                self._keep_rows(decision, completion)
            return False

        # An exact hit's prompt is stored already.
        queued = plan.method != "exact" and self.keep_exact(
            decision, completion, answer=completion.text
        )
        if completion.capture_with_answer is not None and self.keeps_answers:
            token_ids = (*decision.entry.token_ids, *completion.token_ids[:-1])
            self.keep_with_answer(
                replace(decision.entry, token_ids=token_ids),
                completion.text,
                replace(completion, capture=completion.capture_with_answer),
            )
        self._keep_snapshots(decision.entry, completion)
        return queued

    def keep_exact(
        self,
        decision: Decision,
        completion: Completion,
        *,
        answer: str | None = None,
        removal_mark: int | None = None,
    ) -> bool:
        """Queue a prompt's exact state for storage.

        Parameters
        ----------
        decision : Decision
            Decision on the prompt, which describes the entry.
        completion : Completion
            The engine's result, whose state is captured.
        answer : str or None
            The answer to store with the state; None for none.
        removal_mark : int or None
            `queue.mark()` at the start of work in idle time: after a later removal the state is not
            stored.

        Returns
        -------
        bool
            False if the state is stored already or unwanted, the queue is full, or a removal has
            begun since `removal_mark`.
        """
        query, has_vectors = decision.query, self.finder.queried_all_levels(decision.statuses)

        entry = replace(decision.entry, answer=answer, created=now())
        if has_vectors:
            entry = replace(entry, vectors=dict(self.finder.vectors(query)))
        if answer is not None and self.config.answers == "keep":
            note = answer_note(
                decision.ask.answers,
                completion.token_ids,
                completion.arithmetic,
                completion.bitwise,
            )
            entry = replace(entry, metadata={**entry.metadata, **note})

        def removed() -> bool:
            return self._removed_since(removal_mark, entry.partition)

        def complete(meta: StateInfo) -> StateInfo | None:
            # Asked again here: minutes may lie between the queue and the worker.
            if removed():
                return None
            # In the worker's thread: embedding costs no answer any time.
            return meta if has_vectors else replace(meta, vectors=dict(self.finder.vectors(query)))

        queued = not removed() and self._submit(
            entry, completion.capture, complete, completion.shared, levels=has_vectors
        )
        self._keep_snapshots(entry, completion, removed)
        return queued

    def keep_with_answer(
        self,
        entry: StateInfo,
        answer_text: str,
        completion: Completion,
        *,
        removal_mark: int | None = None,
    ) -> bool:
        """Queue the state of a prompt and its answer: the next prompt of a chat begins with both.

        Parameters
        ----------
        entry : StateInfo
            The prompt's entry, with the answer's tokens behind its own.
        answer_text : str
            Text of the answer.
        completion : Completion
            The engine's result; `capture` gives the state of all tokens of the entry.
        removal_mark : int or None
            See `keep_exact`.

        Returns
        -------
        bool
            False if the state is stored already or unwanted, the queue is full, or a removal has
            begun since `removal_mark`.
        """
        digests = [span.digest for span in entry.spans]
        # Without a text for levels: nobody asks for what an answer says.
        entry = replace(
            entry,
            id=exact_key(entry.partition, entry.epoch, entry.token_ids, digests),
            prompt=entry.prompt + answer_text,
            chunk="",
            created=now(),
        )

        def complete(meta: StateInfo) -> StateInfo | None:
            return None if self._removed_since(removal_mark, entry.partition) else meta

        queued = complete(entry) is not None and self._submit(
            entry, completion.capture, complete, completion.shared
        )
        self._keep_snapshots(entry, completion, lambda: complete(entry) is None)
        return queued

    def _removed_since(self, removal_mark: int | None, partition: str) -> bool:
        return removal_mark is not None and self.queue.removed_since(removal_mark, partition)

    def _keep_snapshots(
        self,
        entry: StateInfo,
        completion: Completion,
        removed: Callable[[], bool] = lambda: False,
    ) -> None:
        """Queue the fixed state behind parts of a prompt whose KV entries are stored."""
        # Without KV entries a snapshot serves nobody.
        if not completion.snapshots or self.store.meta(entry.id) is None:
            return
        keys = PrefixKeys(entry.partition, entry.epoch, entry.token_ids, entry.spans)

        before = completion.prompt_tokens - completion.computed_tokens
        for tokens, capture in sorted(completion.snapshots.items()):
            # Behind the answer: stored with the answer's entry, if that is stored.
            if tokens > entry.num_tokens:
                continue
            saved_tokens, before = tokens - before, tokens
            meta = describe_snapshot(entry, tokens, keys.prefix_key(tokens), saved_tokens)
            if self.store.meta(meta.id) is not None:
                continue

            self.store.submit(
                meta,
                capture,
                complete=lambda meta: None if removed() else meta,
                at_once=completion.shared,
                background=self._background,
            )

    def _submit(
        self,
        meta: StateInfo,
        capture: Callable[[], RawTensor | None],
        complete: Callable[[StateInfo], StateInfo | None],
        at_once: bool,
        *,
        levels: bool = False,
    ) -> bool:
        """Queue a state and make it findable at once, by vectors only with `levels`."""
        background, after = self._background, self.finder.add
        submitted = self.store.submit(
            meta, capture, complete=complete, after=after, at_once=at_once, background=background
        )
        # Already now: the next request may be the same prompt.
        if submitted:
            self.finder.add(meta, levels=levels)
        return submitted

    def prefixes(self, epoch: str) -> EpochPrefixes:
        """Return the stored prefixes under an epoch (`engine.epoch`), for `arrange`.

        Parameters
        ----------
        epoch : str
            Fingerprint of the model that computed the state.

        Returns
        -------
        EpochPrefixes
            Tells how many leading tokens of a prompt are stored in a partition.
        """
        return EpochPrefixes(self.store, epoch)

    def _keep_rows(self, decision: Decision, completion: Completion) -> None:
        """Queue a blend's computed rows for storage, each run as an entry."""
        rows, queued_tokens = completion.rows, 0
        if rows is None:
            return
        for meta in self.describe_rows(decision.entry, rows, decision.query.request.ttl):
            capture = partial(rows.capture, meta.position, meta.position + meta.num_tokens)
            if self._submit(meta, capture, self._with_donors, completion.shared):
                queued_tokens += meta.num_tokens
        if queued_tokens:
            self.finder.counts.add(decision.entry.partition, CacheCounts(rows_kept=queued_tokens))

    def _with_donors(self, meta: StateInfo) -> StateInfo | None:
        """Return the description of rows; None if a donor was purged: its rows leave with it."""
        return (
            None if any(self.store.meta(donor) is None for donor in meta.metadata[DONORS]) else meta
        )

    def describe_rows(
        self, entry: StateInfo, rows: ComputedRows, ttl: float | None = None
    ) -> list[StateInfo]:
        """Describe a blend's computed rows, one description a run; none beyond `max_generation`.

        Rows expire no later than any donor they attended to.

        Parameters
        ----------
        entry : StateInfo
            `Decision.entry` of the blended prompt.
        rows : ComputedRows
            The computed rows of `Completion.rows`.
        ttl : float or None
            Limit of the request, in seconds.

        Returns
        -------
        list[StateInfo]
            Descriptions of the entries to store, in the order of `rows.runs`; empty beyond
            `max_generation`.
        """
        if rows.generation > self.config.max_generation:
            return []

        donors = [meta for meta in map(self.store.meta, rows.donors) if meta is not None]
        lives = (
            ttl,
            self.config.lifetime(self.config.ttl_rows),
            *(remaining_seconds(meta, now()) for meta in donors),
        )
        return [
            described_rows(entry, rows, first, stop, shortest_lifetime(*lives))
            for first, stop in rows.runs
        ]

    def serves(self, engine: Engine) -> None:
        """Register an engine, weakly, and prepare it before the first request.

        Its costs are measured, and it gets ready for the method of reuse.

        Parameters
        ----------
        engine : Engine
            Engine that runs the cache's plans.

        Raises
        ------
        ModelError
            The method of reuse is unsupported by engine or model.
        """
        check_method(engine, self.config)

        self._served.add(engine)
        engine.keeps_answers = engine.keeps_answers or self.keeps_answers
        self.costs(engine)
        engine.get_ready(ReuseRequest(self.config.reuse).method)

    def weights_changed(self) -> None:
        """Let every registered engine fingerprint its model again.

        See docs/explanation/exactness.md.
        """
        for engine in list(self._served):
            engine.weights_changed()

    def stats(self, partition: str | None) -> CacheCounts:
        """Return a copy of a partition's counters.

        Parameters
        ----------
        partition : str or None
            None sums over all partitions, for the operator of the process.

        Returns
        -------
        CacheCounts
            Counts of lookups, hits, rejections, promotions and stored rows.

        Raises
        ------
        InputError
            The partition is invalid.
        """
        check_scope(partition)
        counts = self.finder.counts.for_partition(partition)
        # The operator's series begin with 0.
        if partition is None:
            for level in self.finder.level_names:
                counts.hits.setdefault(level, 0)
            for guard in self.finder.guards:
                counts.rejections.setdefault(guard.name, 0)
        return counts

    def trust(self, partition: str | None) -> TrustReport | None:
        """Report on the error bound of a partition, of its group if it shares evidence, or of all.

        Parameters
        ----------
        partition : str or None
            None reports on all partitions, for the operator.

        Returns
        -------
        TrustReport or None
            None without a bound, and while the evidence cannot be read, which is logged.

        Raises
        ------
        InputError
            The partition is invalid.
        """
        check_scope(partition)
        return self.gate.report_or_none(partition) if self.gate is not None else None

    def clear(self, partition: str) -> int:
        """Remove a partition's entries and counters, and return the number of entries; see `purge`.

        Parameters
        ----------
        partition : str
            Tenant whose entries leave.

        Returns
        -------
        int
            Number of removed entries.

        Raises
        ------
        StoreError
            Entries remain.
        InputError
            The partition is invalid.
        """
        check_partition(partition)
        purged = self.purge(Selection(partition))
        self.finder.counts.clear(partition)
        return len(purged.ids)

    def _on_arrival(self, id: str) -> None:
        """Index an entry that another machine stored."""
        meta = self.store.meta(id)
        if meta is not None:
            self.finder.add(meta)

    def purge(self, selection: Selection, *, dry_run: bool = False) -> PurgeResult:
        """Remove the selected entries and everything derived from them, to the last byte.

        A running request finishes and is stored afterwards; rows of a blend only while all donors
        remain. Work in idle time that runs now is not stored, and what waits for it is dropped.

        Parameters
        ----------
        selection : Selection
            Which entries to remove, by partition, epoch, id or age.
        dry_run : bool
            Report without removing.

        Returns
        -------
        PurgeResult
            What was removed, or would be: counts and bytes.

        Raises
        ------
        StoreError
            Entries or traces remain.
        InputError
            The partition is invalid.
        """
        check_scope(selection.partition)
        if not dry_run:
            # First: from here on nothing begun in idle time is stored.
            self.queue.begin_removal(selection.partition)

        self.store.flush()
        purged = self.store.purge(selection, dry_run=dry_run)
        if not dry_run:
            self.queue.clear(selection.partition)
            # Once more: something may have been written from an entry as it was removed.
            self.store.flush()
            if purged.ids:
                # By id: what was made from a purged entry meanwhile names it as a donor.
                purged += self.store.purge(Selection(selection.partition, donors=tuple(purged.ids)))

        if self.fusion is not None:
            purged += self.fusion.store.purge(selection.for_output_stores(purged), dry_run=dry_run)
        return purged

    @property
    def embed_counts(self) -> dict[str, int]:
        """Counts of the embedding hook's vectors and failures, if it counts."""
        return dict(getattr(self.finder.embed, "counts", {}))

    def flush(self) -> None:
        """Wait until everything queued is stored or refused, and stored prompts are indexed."""
        self.store.flush()
        self.finder.wait()

    def close(self) -> None:
        """Finish the saves, and close the stores and the gate. Waiting labels are lost."""
        # Before the gate, which is told of the waiting labels that are lost.
        self.queue.close()
        if self.gate is not None:
            self.gate.close()
        # Its thread reads the store, which is closed next.
        self.finder.stop()
        self.store.close()
        if self.fusion is not None:
            self.fusion.store.close()


def described_rows(
    entry: StateInfo, rows: ComputedRows, first: int, stop: int, ttl: float = 0.0
) -> StateInfo:
    """Describe rows `first` to `stop - 1` of a blended prompt, to store them.

    The description has neither prompt nor chunk, so that no level compares it, and no spans, since
    runs hold no media.

    Parameters
    ----------
    entry : StateInfo
        See `Decision`.
    ttl : float
        Seconds until the rows expire; see `StateInfo`.
    """
    token_ids = entry.token_ids[first:stop]
    return StateInfo(
        id=rows_key(
            entry.partition, entry.epoch, token_ids, first, rows.generation, entry.id, rows.donors
        ),
        partition=entry.partition,
        epoch=entry.epoch,
        token_ids=token_ids,
        prompt="",
        chunk="",
        kind=ROWS,
        created=now(),
        metadata={
            "request": entry.metadata["request"],
            PROMPT: entry.id,
            DONORS: list(rows.donors),
        },
        position=first,
        generation=rows.generation,
        ttl=ttl,
    )


def check_method(engine: Engine, config: SemanticCacheConfig) -> None:
    """Check that engine and model support the method of reuse that is set.

    Raises
    ------
    ModelError
        Engine or model does not support the method.
    """
    method = method_named(config.reuse)
    if reason := method.unsupported(engine):
        raise ModelError(f"reuse={config.reuse}: {reason}. {method.remedy}")
