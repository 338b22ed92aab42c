"""One request, end to end: prepare, look up, plan, run, record. The same body serves `run`, the server and examples."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from dejakv.cache import HierarchicalCache
from dejakv.engines.base import Completion, Engine, KnowsPrefixCost, Prepared, Start
from dejakv.errors import InputError, ModelChangedError, ModelError
from dejakv.levels.base import Status
from dejakv.lookup import Lookup
from dejakv.planner import Plan
from dejakv.records import Record
from dejakv.request import Request
from dejakv.store.base import Chunk, ChunkMeta

OnToken = Callable[[int, str], None]


@dataclass(frozen=True)
class Answer:
    """The text, and what serving it took.

    cached_answer  the donor's own answer, for reports
    completion     what the engine returned
    """

    text: str
    token_ids: tuple[int, ...]
    record: Record
    cached_answer: str | None
    completion: Completion


class Pipeline:
    """Serves requests with one engine and at most one cache. Without a cache every request is computed in full."""

    def __init__(self, engine: Engine, cache: HierarchicalCache | None = None) -> None:
        self.engine = engine
        self.cache = cache
        if cache is not None and hasattr(engine, "weights_changed"):
            cache.serves(engine)

    def answer(self, request: Request, *, on_token: OnToken | None = None, no_store: bool = False) -> Answer:
        """Runs one request. Storing happens in the background after the answer is complete.

        Raises: InputError if the request itself cannot be served. The cache never makes a request fail.
        """
        clock = _FirstToken(time.perf_counter(), on_token)
        prepared = self.engine.prepare(request)
        for _ in range(_TRIES):
            epoch = self.engine.epoch
            if self.cache is None or not epoch:
                break
            try:
                return self._from_cache(self.cache, replace(prepared, epoch=epoch), clock, no_store)
            except ModelChangedError:  # nothing was computed; a changed processor counts otherwise
                prepared = self.engine.prepare(request)
        completion = self.engine.run(prepared, sampling=request.sampling, on_token=clock)
        chosen = Plan("none", reason=getattr(self.engine, "unidentified", "") if self.cache is not None else "")
        return _answer(prepared, completion, chosen, None, clock, None)

    def weights_changed(self) -> None:
        """Has the engine fingerprint its model anew, where it can."""
        changed = getattr(self.engine, "weights_changed", None)
        if changed is not None:
            changed()

    def _from_cache(self, cache: HierarchicalCache, prepared: Prepared, clock: "_FirstToken", no_store: bool) -> Answer:
        lookup = self._worth(cache.lookup(prepared, prepared.epoch), len(prepared.token_ids))
        chosen = cache.plan(prepared, lookup)
        completion, chosen = self._run(prepared, chosen, lookup, clock)
        if cache.config.enable_fusion_cache:
            lookup = replace(lookup, statuses={**lookup.statuses, "fusion": _fusion_status(prepared, completion)})
        answer = _answer(prepared, completion, chosen, lookup, clock, chosen.donors[:1] or None)
        if no_store:
            return answer
        stored = cache.record(prepared, lookup, chosen, completion, prepared.epoch)
        return replace(answer, record=replace(answer.record, stored=stored))

    def _worth(self, lookup: Lookup, tokens: int) -> Lookup:
        """The lookup without an exact prefix that would make the request slower."""
        if lookup.prefix is None or not isinstance(self.engine, KnowsPrefixCost):
            return lookup
        if self.engine.prefix_pays(lookup.prefix[0].tokens, tokens):
            return lookup
        status = "hit" if lookup.match else "miss"
        return replace(lookup, prefix=None, statuses={**lookup.statuses, "kv_cache": status})

    def _run(self, prepared: Prepared, chosen: Plan, lookup: Lookup, clock: "_FirstToken") -> tuple[Completion, Plan]:
        """Runs the plan; where the donor's state cannot be used, the next plainer one. Returns what was run in the end."""
        assert self.cache is not None
        sampling = prepared.request.sampling
        chunks = [chunk for meta in chosen.donors if (chunk := self.cache.store.get(meta.id)) is not None]
        if chosen.method == "none":
            return self.engine.run(prepared, sampling=sampling, on_token=clock), chosen
        if not chunks:
            return self._run(prepared, self._plainer(prepared, chosen, lookup, _UNREADABLE), lookup, clock)
        if chosen.method == "blend":
            return self._blend(prepared, chosen, chunks, lookup, clock)
        target = prepared if chosen.method != "adopt" else in_place_of(prepared, chunks[0].meta)
        tokens = chosen.reused if chosen.method == "prefix" else chunks[0].meta.num_tokens - 1
        try:
            start = Start(chunks[0], tokens)
            return self.engine.run(target, start=start, sampling=sampling, on_token=clock), chosen
        except (ModelError, InputError) as error:
            if clock.seconds is not None:  # the client has seen a part of this answer
                raise
            reason = f"the donor's state does not fit: {error}"
            self.cache.store.delete(chunks[0].meta.id)  # or it would stand in the way of a right one for ever
        return self._run(prepared, self._plainer(prepared, chosen, lookup, reason), lookup, clock)

    def _plainer(self, prepared: Prepared, chosen: Plan, lookup: Lookup, reason: str) -> Plan:
        """After an approximate plan the exact prefix, after that nothing."""
        assert self.cache is not None
        if not chosen.approximate:
            return Plan("none", reason=reason)
        return replace(self.cache.exact_plan(prepared, lookup), reason=reason)

    def _blend(
        self, prepared: Prepared, chosen: Plan, chunks: list[Chunk], lookup: Lookup, clock: "_FirstToken"
    ) -> tuple[Completion, Plan]:
        assert self.cache is not None
        from dejakv.reuse.blend import BlendConfig, run_blend  # torch, only where blend is asked for

        config = self.cache.config
        settings = BlendConfig(map=config.blend_map, selector=config.blend.selector, share=config.blend.share)
        held = lookup.prefix[0].tokens if lookup.prefix else 0
        spare = 1.0 - (held + config.min_gain) / len(prepared.token_ids)  # what the exact prefix leaves to save
        settings = replace(settings, max_computed=max(0.0, spare))
        ran = chosen

        def instead() -> Completion:
            nonlocal ran
            completion, ran = self._run(prepared, self._plainer(prepared, chosen, lookup, ""), lookup, clock)
            return completion

        sampling = prepared.request.sampling
        try:
            completion = run_blend(
                self.engine, prepared, chunks, settings, sampling=sampling, on_token=clock, instead=instead
            )
        except ModelError as error:
            if clock.seconds is not None or ran is not chosen:
                raise
            return self._run(prepared, self._plainer(prepared, chosen, lookup, f"blend: {error}"), lookup, clock)
        report = completion.details["blend"]
        if not report.blended and ran is chosen:  # the engine ran it exactly by itself
            whole = completion.computed_tokens == completion.prompt_tokens
            ran = Plan("none") if whole else self._plainer(prepared, chosen, lookup, "")
        if ran is not chosen:
            return completion, replace(ran, reason=report.reason)
        return completion, replace(chosen, reused=completion.prompt_tokens - completion.computed_tokens)


_TRIES = 3
"""Lookups for one request while its model keeps changing; then it is computed."""

_UNREADABLE = "the donor's state could not be read"


def in_place_of(prepared: Prepared, donor: ChunkMeta) -> Prepared:
    """The donor's prompt as this request's: its tokens and media spans, this one's sampling and partition."""
    return replace(prepared, token_ids=donor.token_ids, spans=donor.spans, inputs=None)


def _fusion_status(prepared: Prepared, completion: Completion) -> Status:
    """Encoder outputs are `skip` where none were needed, `hit` where all came from the registry."""
    held = completion.prompt_tokens - completion.computed_tokens
    if all(span.start + span.length <= held for span in prepared.spans):
        return "skip"
    return "miss" if completion.encoder_runs else "hit"


class _FirstToken:
    """Remembers when the first token came, and passes tokens on."""

    def __init__(self, began: float, on_token: OnToken | None) -> None:
        self.began = began
        self.seconds: float | None = None
        self._on_token = on_token

    def __call__(self, token: int, text: str) -> None:
        if self.seconds is None:
            self.seconds = time.perf_counter() - self.began
        if self._on_token is not None:
            self._on_token(token, text)


def _answer(
    prepared: Prepared,
    completion: Completion,
    chosen: Plan,
    lookup: Lookup | None,
    clock: _FirstToken,
    donors: tuple[ChunkMeta, ...] | None,
) -> Answer:
    request = prepared.request
    latency = time.perf_counter() - clock.began
    prompt_tokens = len(prepared.token_ids)  # this prompt's own, also where a donor's was run in its place
    donor = donors[0] if donors else None
    match = chosen.match
    level = match.level if match else chosen.method if chosen.method == "prefix" else ""
    provenance = f"hit ({match.provenance})" if match else "hit (prefix)" if chosen.method == "prefix" else "miss"
    record = Record(
        request_id=request.id,
        key=lookup.key if lookup else "",
        method=chosen.method,
        level=level,
        provenance=provenance,
        donor=donor.id if donor else None,
        score=match.score if match else None,
        reason=chosen.reason,
        statuses=lookup.statuses if lookup else {},
        prompt_tokens=prompt_tokens,
        computed_tokens=completion.computed_tokens,
        reused_tokens=max(0, prompt_tokens - completion.computed_tokens),
        output_tokens=len(completion.token_ids),
        encoder_runs=completion.encoder_runs,
        ttft_ms=1e3 * (clock.seconds if clock.seconds is not None else latency),
        latency_ms=1e3 * latency,
        lookup_ms=1e3 * lookup.seconds if lookup else 0.0,
        inject_ms=1e3 * completion.inject_s,
        bytes_loaded=completion.bytes_loaded,
        approximate=chosen.approximate,
    )
    return Answer(completion.text, completion.token_ids, record, donor.answer if donor and match else None, completion)
