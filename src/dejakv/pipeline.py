"""One request, end to end: prepare, look up, plan, run, record. The same body serves `run`, the server and examples."""

import threading
import time
from dataclasses import replace

from dejakv.answers import Answer as Answer
from dejakv.answers import FirstToken, answer_of, fusion_status
from dejakv.cache import HierarchicalCache
from dejakv.costs import Costs
from dejakv.engines.base import (
    NO_STATE,
    UNREADABLE,
    Blends,
    Completion,
    Engine,
    FollowsWeights,
    HoldsState,
    KnowsCosts,
    OnToken,
    Prepared,
    Start,
    check_top_layer,
    costs_of,
    encoder_outputs_of,
    reusable,
)
from dejakv.errands import Errands
from dejakv.errors import InputError, ModelChangedError, ModelError
from dejakv.find.ask import Ask
from dejakv.find.decision import Decision, settled
from dejakv.find.plan import most_computed
from dejakv.find.ways import Plan
from dejakv.labelling import Attempt
from dejakv.part_order import Arrangement, arranged
from dejakv.request import Request
from dejakv.retention import forget, keeping
from dejakv.store.base import Chunk, ChunkMeta
from dejakv.store.donors import StoredDonor, load_beginning
from dejakv.store.selection import Purged, Selection


class Pipeline(Errands):
    """Serves requests with one engine and at most one cache. Without a cache every request is computed in full.

    promotes  prompts that were answered approximately wait to be computed exactly

    Raises: ModelError for settings that engine or model cannot follow.

    Its owner calls `run_errand` in idle time, behind requests: it promotes prompts, and it labels would-be hits where the cache has an
    error bound. Without it a bound serves nothing approximate.
    """

    def __init__(
        self,
        engine: Engine,
        cache: HierarchicalCache | None = None,
        *,
        promotes: bool = False,
    ) -> None:
        self.engine = engine
        self.cache = cache
        self.promotes = promotes
        self._errand = threading.Lock()
        if cache is not None:
            check_top_layer(engine, cache.config)
        if cache is not None and isinstance(engine, FollowsWeights):
            cache.serves(engine)
        if cache is not None:
            costs_of(engine, cache.config.costs)  # measured now, and not while the first request waits

    def answer(self, request: Request, *, on_token: OnToken | None = None) -> Answer:
        """Runs one request. Storing happens in the background after the answer is complete.

        Raises: InputError if the request itself cannot be served. The cache never makes a request fail.
        """
        with keeping(no_store=request.no_store, ttl=request.ttl):
            return self._in_order(request, FirstToken(time.perf_counter(), on_token))

    def _in_order(self, request: Request, clock: FirstToken) -> Answer:
        """Answers the request with its parts in the order that saves most."""
        best = self._arrangement(request)
        if best is None:
            return self._answer(request, clock)
        other = best.changed and self._saves(best)
        answer = self._answer(best.of(request) if other else request, clock)
        record = replace(answer.record, lookup_ms=answer.record.lookup_ms + 1e3 * best.seconds)
        return replace(answer, record=replace(record, order=best.order) if other else record)

    def _answer(self, request: Request, clock: FirstToken) -> Answer:
        prepared = self.engine.prepare(request)
        for _ in range(_TRIES):
            epoch = prepared.epoch or self.engine.epoch
            if self.cache is None or not epoch:
                break
            try:
                return self._from_cache(self.cache, replace(prepared, epoch=epoch), clock)
            except ModelChangedError:  # nothing was computed; a changed processor counts otherwise
                prepared = self.engine.prepare(request)
        prepared = replace(prepared, epoch="")
        completion = self.engine.run(prepared, sampling=request.sampling, on_token=clock)
        reason = self.engine.unidentified if self.cache is not None and isinstance(self.engine, FollowsWeights) else ""
        chosen = Plan("none", reason=reason)
        return answer_of(prepared, completion, chosen, None, clock, None)

    def _arrangement(self, request: Request) -> Arrangement | None:
        """The order of its parts in which most of the prompt was computed before; None for a prompt that runs as it is."""
        epoch = self.engine.epoch
        if request.order != "free" or self.cache is None or not self.cache.config.free_order or not epoch:
            return None

        def tokenize(text: str) -> tuple[int, ...]:
            return self.engine.prepare(replace(request, prompt=text, parts=(), order="given")).token_ids

        return arranged(request.frame, self.cache.prefixes(epoch), tokenize, request.partition)

    def _saves(self, best: Arrangement) -> bool:
        """Whether the longer prefix takes less time than the order given. Without costs every longer one does."""
        assert self.cache is not None
        costs, piece = costs_of(self.engine, self.cache.config.costs), getattr(self.engine, "piece", 1)
        held, given = (reusable(tokens, best.tokens, piece) for tokens in (best.held, best.given))
        return costs is None or costs.prefix_saves(held, given, best.tokens)

    def purge(self, selection: Selection, *, dry_run: bool = False) -> Purged:
        """`HierarchicalCache.purge`, and the same of the engine's encoder outputs and of what it remembers for speed.

        It waits for what idle time is computing, which is not kept: a label ends at its next token. Raises: StoreError.
        """
        if self.cache is not None and not dry_run:
            self.cache.removals.note(selection.partition)
        with self._errand:
            return self._purge(selection, dry_run)

    def _purge(self, selection: Selection, dry_run: bool) -> Purged:
        purged = self.cache.purge(selection, dry_run=dry_run) if self.cache is not None else Purged()
        registry = encoder_outputs_of(self.engine)
        if registry is not None:
            purged += registry.purge(selection.of_others(purged), dry_run=dry_run)
        if not dry_run:
            forget([self.engine], selection.partition)
        return purged

    def weights_changed(self) -> None:
        """Has the engine fingerprint its model anew, where it can."""
        if isinstance(self.engine, FollowsWeights):
            self.engine.weights_changed()

    def _from_cache(self, cache: HierarchicalCache, prepared: Prepared, clock: FirstToken) -> Answer:
        most = self.engine.most_donors if isinstance(self.engine, Blends) else None
        ask = Ask.of(prepared.request, cache.config, donors=most)
        if isinstance(self.engine, Blends) and prepared.request.sampling.num_beams == 1:
            ask = replace(ask, tells_first_token=self.engine.tells_first_token)
        decision = cache.find(prepared, ask, costs=self._costs(cache))
        attempt = Attempt(cache, prepared, decision)
        fusing = cache.fusing
        injected = fusing.inject(self.engine, prepared, decision.plan) if fusing is not None else None
        completion, chosen = self._run(prepared, decision.plan, attempt.decision, clock)
        attempt.answered(completion, chosen)
        decision = attempt.decision
        if fusing is not None:
            fusing.capture(self.engine, prepared, decision.key, chosen)
        decision = replace(decision, statuses=settled(decision.statuses, chosen))
        if cache.config.enable_fusion_cache:
            fusion = injected or fusion_status(prepared, completion)
            decision = replace(decision, statuses={**decision.statuses, "fusion": fusion})
        answer = answer_of(prepared, completion, chosen, decision, clock, chosen.donors[:1] or None)
        stored = cache.record(prepared, decision, chosen, completion, promote=self.promotes)
        return replace(answer, record=replace(answer.record, stored=stored))

    def _run(self, prepared: Prepared, chosen: Plan, decision: Decision, clock: FirstToken) -> tuple[Completion, Plan]:
        """Runs the plan; where the donor's state cannot be used, the next plainer one. Returns what was run in the end."""
        assert self.cache is not None
        sampling = prepared.request.sampling
        if chosen.method == "none":
            return self.engine.run(prepared, sampling=sampling, on_token=clock), chosen
        if chosen.piecewise:
            return self._piecewise(prepared, chosen, decision, clock)
        begun = time.perf_counter()
        chunks = self._chunks(self.cache, chosen)
        reading = time.perf_counter() - begun
        if not chunks:
            return self._run(prepared, _plainer(chosen, decision, UNREADABLE), decision, clock)
        target = prepared if chosen.method != "adopt" else in_place_of(prepared, chunks[0].meta)
        tokens = chosen.reused if chosen.method == "prefix" else chunks[0].meta.num_tokens - 1
        try:
            start = None if isinstance(self.engine, HoldsState) else Start(chunks[0], tokens)
            completion = self.engine.run(target, start=start, sampling=sampling, on_token=clock)
        except (ModelError, InputError) as error:
            if clock.seconds is not None:  # the client has seen a part of this answer
                raise
            reason = f"the donor's state does not fit: {error}"
            self.cache.store.delete(chunks[0].meta.id)  # or it would stand in the way of a right one for ever
            return self._run(prepared, _plainer(chosen, decision, reason), decision, clock)
        if isinstance(self.engine, KnowsCosts):
            self.engine.loaded(completion.bytes_loaded, reading + completion.inject_s)
        return completion, chosen

    def _chunks(self, cache: HierarchicalCache, chosen: Plan) -> list[Chunk]:
        """The donors' state, as far as it can be read and is used; only their descriptions where the engine holds it."""
        if isinstance(self.engine, HoldsState):
            return _described(chosen)
        if chosen.method == "prefix":
            loaded = [load_beginning(cache.store, meta, chosen.reused) for meta in chosen.donors]
        else:
            loaded = [cache.store.get(meta.id) for meta in chosen.donors]
        return [chunk for chunk in loaded if chunk is not None]

    def _costs(self, cache: HierarchicalCache) -> Costs | None:
        """What plans cost; None where that decides nothing: a study of answers is none of time."""
        return None if cache.config.unsound else costs_of(self.engine, cache.config.costs)

    def _piecewise(
        self, prepared: Prepared, chosen: Plan, decision: Decision, clock: FirstToken
    ) -> tuple[Completion, Plan]:
        assert self.cache is not None
        from dejakv.engines.blending import run_blend  # torch, only where blend is asked for
        from dejakv.reuse.blend import BlendConfig
        from dejakv.reuse.top_layer import TopLayerConfig

        config, tokens = self.cache.config, len(prepared.token_ids)
        most = most_computed(tokens, chosen, decision.exact, config.min_gain, self._costs(self.cache))
        settings: BlendConfig | TopLayerConfig
        if chosen.method == "top_layer":
            settings = TopLayerConfig(config.top_layer_tail, max_computed=most, unsound=config.unsound)
        else:
            quality = config.blend
            settings = BlendConfig(config.blend_map, quality.selector, quality.share, max_computed=most)
        store, ran = self.cache.store, chosen
        holds = isinstance(self.engine, HoldsState)
        donors = _described(chosen) if holds else [StoredDonor(store, meta) for meta in chosen.donors]

        def instead() -> Completion:
            nonlocal ran
            completion, ran = self._run(prepared, _plainer(chosen, decision, ""), decision, clock)
            return completion

        sampling = prepared.request.sampling
        try:
            accept = decision.trial.accept if decision.trial is not None else None
            completion = run_blend(
                self.engine,
                prepared,
                donors,
                settings,
                sampling=sampling,
                on_token=clock,
                instead=instead,
                accept=accept,
            )
        except ModelError as error:
            if clock.seconds is not None or ran is not chosen:
                raise
            return self._run(prepared, _plainer(chosen, decision, f"{chosen.method}: {error}"), decision, clock)
        report = completion.details["blend"]
        if not report.blended and ran is chosen:  # the engine ran it exactly by itself
            whole = completion.computed_tokens == completion.prompt_tokens
            ran = Plan("none") if whole else _plainer(chosen, decision, "")
        if ran is not chosen:
            return completion, replace(ran, reason=report.reason)
        return completion, replace(chosen, reused=completion.prompt_tokens - completion.computed_tokens)


def _plainer(chosen: Plan, decision: Decision, reason: str) -> Plan:
    """After an approximate plan the exact prefix, after that nothing."""
    return replace(decision.exact if chosen.approximate else Plan("none"), reason=reason)


_TRIES = 3
"""Lookups for one request while its model keeps changing; then it is computed."""


def _described(chosen: Plan) -> list[Chunk]:
    return [Chunk(meta, NO_STATE) for meta in chosen.donors]


def in_place_of(prepared: Prepared, donor: ChunkMeta) -> Prepared:
    """The donor's prompt as this request's: its tokens and media spans, this one's sampling and partition."""
    return replace(prepared, token_ids=donor.token_ids, spans=donor.spans, inputs=None)
