"""Serve one request: prepare, decide, run the best plan that works, store the state, record."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dejakv.cache import HierarchicalCache
from dejakv.decide.part_order import PartArrangement, arranged
from dejakv.decide.plan import FULL, Plan
from dejakv.engines.base import Completion, Engine, OnToken
from dejakv.errors import ModelChangedError, ModelError
from dejakv.idle import Settler
from dejakv.records import Answer as Answer
from dejakv.records import Record
from dejakv.request import Prepared, Request, keeping, reusable
from dejakv.store.selection import PurgeResult, Selection

_TRIES = 3
"""Most lookups for a request while its model keeps changing; then it is computed."""


class Pipeline:
    """Serves requests with one engine and at most one cache; without a cache, in full.

    promotes  queue approximately answered prompts for exact computation

    Raises: ModelError for settings unsupported by engine or model.

    Call `settle_one` in idle time: it promotes prompts and, under an error bound, labels would-be hits. Without labels a bound serves
    nothing approximate.
    """

    def __init__(self, engine: Engine, cache: HierarchicalCache | None = None, *, promotes: bool = False) -> None:
        self.engine = engine
        self.cache = cache
        self.promotes = promotes
        self._settling = threading.Lock()
        """Held while a prompt is settled: a purge waits for it."""
        if cache is not None:
            cache.serves(engine)

    def answer(self, request: Request, *, on_token: OnToken | None = None) -> Answer:
        """Run one request. The state is stored in the background, after the answer.

        Raises: InputError for an invalid request. The cache never makes a request fail.
        """
        began = time.perf_counter()
        with keeping(no_store=request.no_store, ttl=request.ttl):
            for _ in range(_TRIES):
                try:
                    return self._answer(self._prepared(request), began, on_token)
                except ModelChangedError:  # nothing was computed; a changed processor counts otherwise
                    continue
            # An empty epoch uses no state: a model that changes all the time is still answered.
            return self._answer(replace(self.engine.prepare(request), epoch=""), began, on_token)

    def _answer(self, prepared: Prepared, began: float, on_token: OnToken | None) -> Answer:
        cache = self.cache
        if cache is None or not prepared.epoch:
            unidentified = self.engine.unidentified if cache is not None else ""
            waited_seconds = time.perf_counter() - began
            plan, completion = self.run_plans(prepared, (replace(FULL, reason=unidentified),), on_token)
            decision, stored = None, False
        else:
            decision = cache.decide(prepared, self.engine)
            waited_seconds = time.perf_counter() - began
            plan, completion = self.run_plans(prepared, decision.plans, on_token)
            if plan.method == "none" and self.engine.no_reuse:
                plan = replace(plan, reason=self.engine.no_reuse)
            stored = cache.keep(prepared, decision, plan, completion)
            if self.promotes and plan.approximate and plan.answer is None and not cache.config.quantizes:
                cache.queue.promote(decision)

        record = Record.of(prepared, decision, plan, completion, waited_seconds, stored)
        cached = plan.donors[0].answer if plan.match is not None else None
        return Answer(completion.text, completion.token_ids, record, cached, completion, decision)

    def run_plans(
        self, prepared: Prepared, plans: Sequence[Plan], on_token: OnToken | None = None
    ) -> tuple[Plan, Completion]:
        """Run plans, best first, until the engine accepts one. Returns it, with the reason of the first refusal; the completion's times count
        from this call. Raises: ModelError if the engine refuses the last.

        plans  the last is full computation
        """
        store, reason, began = self.cache.store if self.cache is not None else None, "", time.perf_counter()
        for plan in plans:
            # What refused plans took is time that the caller waited for.
            waited = time.perf_counter() - began
            if (stored_answer := plan.answer) is not None:
                if on_token is not None and stored_answer.token_ids:
                    on_token(stored_answer.token_ids[0], stored_answer.text)
                tokens = len(prepared.token_ids)
                return plan, Completion(
                    stored_answer.text,
                    stored_answer.token_ids,
                    tokens,
                    0,
                    arithmetic=stored_answer.arithmetic,
                    bitwise=stored_answer.bitwise,
                )
            completion = self.engine.run(prepared, plan, store, on_token=on_token)

            if isinstance(completion, Completion):
                completion = replace(
                    completion, ttft_s=waited + completion.ttft_s, latency_s=waited + completion.latency_s
                )
                if completion.exactly:  # vLLM's connector finds out by itself that a blend is not worth it
                    full = completion.computed_tokens == len(prepared.token_ids)
                    plan, reason = (
                        FULL if full else next(each for each in plans if not each.approximate),
                        completion.exactly,
                    )
                return replace(plan, reason=reason) if reason else plan, completion
            reason = reason or completion.reason

        raise ModelError(
            f"the engine {self.engine.name} refused every plan ({reason}): full computation must not be refused"
        )

    def _prepared(self, request: Request) -> Prepared:
        """Tokenize a request under the engine's epoch, its parts in the order with most reuse."""
        engine, cache, places = self.engine, self.cache, ()
        order = self._order(request) if request.order == "free" else None
        if order is not None and order.changed and cache is not None:
            reordered_tokens, initial_tokens = (
                reusable(tokens, order.tokens, engine.piece) for tokens in (order.held, order.given)
            )
            costs = cache.costs(engine)
            # Another order may change the answer: only where it makes the prompt faster.
            if costs is None or costs.prefix_saves(reordered_tokens, initial_tokens, order.tokens):
                places, request = order.order, order.of(request)

        prepared = engine.prepare(request)
        epoch = (prepared.epoch or engine.epoch) if cache is not None else ""
        return replace(prepared, epoch=epoch, order=places, order_s=order.seconds if order is not None else 0.0)

    def _order(self, request: Request) -> PartArrangement | None:
        """Order a prompt's parts for the longest stored prefix."""
        cache, epoch = self.cache, self.engine.epoch
        if cache is None or cache.off or not (cache.config.free_order and cache.config.finds_prefixes) or not epoch:
            return None

        def tokenize(text: str) -> tuple[int, ...]:
            return self.engine.prepare(replace(request, prompt=text, parts=(), order="given")).token_ids

        return arranged(request.frame, cache.prefixes(epoch), tokenize, request.partition)

    @property
    def waiting(self) -> int:
        """Number of prompts to settle."""
        return len(self.cache.queue) if self.cache is not None else 0

    def settle_one(self) -> bool:
        """Settle one prompt: label a would-be hit, else promote an approximately answered prompt. False if none waits.

        For idle time. A label takes up to twice the time of its request, a promotion that of the prompt's prefill.
        """
        return self._settled(Settler.settle_one)

    def label_one(self) -> bool:
        """Label the oldest would-be hit for the error bound. False if none waits. A failure counts as a wrong answer and is logged."""
        return self._settled(Settler.label_one)

    def promote_one(self) -> bool:
        """Compute the newest waiting prompt exactly and store its state for later exact hits. False if none waits."""
        return self._settled(Settler.promote_one)

    def _settled(self, settle_step: Callable[[Settler], bool]) -> bool:
        if self.cache is None:
            return False
        with self._settling:
            return settle_step(Settler(self.engine, self.cache, self.run_plans))

    def stop_settling(self) -> None:
        """End a running label at its next token and label nothing more; later would-be hits are lost."""
        if self.cache is not None:
            self.cache.queue.close()

    def purge(self, selection: Selection, *, dry_run: bool = False) -> PurgeResult:
        """Purge the cache (`HierarchicalCache.purge`), the engine's encoder outputs and its memory of requests.

        Waits for work in idle time, which is not stored; a label ends at its next token. Raises: StoreError.
        """
        if self.cache is not None and not dry_run:
            # Before waiting for the lock: it has the running label end at its next token.
            self.cache.queue.removing(selection.partition)

        with self._settling:
            purged = self.cache.purge(selection, dry_run=dry_run) if self.cache is not None else PurgeResult()
            registry = self.engine.encoder_cache
            if registry is not None:
                purged += registry.purge(selection.of_others(purged), dry_run=dry_run)
            if not dry_run:
                self.engine.forget(selection.partition)
            return purged

    def weights_changed(self) -> None:
        """Let the engine fingerprint its model again, if it can."""
        self.engine.weights_changed()
