"""The way of one request.

It prepares, decides, runs the best plan that works, stores the state and makes a record.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dejakv import tracing
from dejakv.cache import HierarchicalCache
from dejakv.decide.method import method_of
from dejakv.decide.part_order import PartArrangement, arrange_frame
from dejakv.decide.plan import FULL, Plan
from dejakv.engines.base import Completion, Engine, OnToken, Refusal
from dejakv.errors import ModelChangedError, ModelError
from dejakv.idle import Settler
from dejakv.records import Answer as Answer
from dejakv.records import Record, shorten_reason
from dejakv.request import Prepared, Request, retention_scope, reusable_tokens
from dejakv.store.selection import PurgeResult, Selection

_TRIES = 3
"""Most lookups for a request while its model keeps changing; then it is computed in full."""


class Pipeline:
    """Serves requests with one engine and at most one cache; without a cache, in full.

    Call `settle_one` in idle time: it promotes prompts and, under an error bound, labels would-be
    hits. Without labels a bound serves nothing approximate.

    Parameters
    ----------
    engine : Engine
        Engine that answers.
    cache : HierarchicalCache or None
        Cache of the state; not closed by the pipeline. None computes every prompt in full.
    promotes : bool
        Whether approximately answered prompts are queued for exact computation.

    Raises
    ------
    ModelError
        A setting is unsupported by engine or model.
    """

    def __init__(
        self, engine: Engine, cache: HierarchicalCache | None = None, *, promotes: bool = False
    ) -> None:
        self.engine = engine
        self.cache = cache
        self.promotes = promotes
        self._settling = threading.Lock()
        """Held while a prompt is settled: a purge waits for it."""
        if cache is not None:
            cache.serves(engine)

    def answer(self, request: Request, *, on_token: OnToken | None = None) -> Answer:
        """Run one request. The state is stored in the background, after the answer.

        A store that cannot be read or written costs reuse alone.

        Parameters
        ----------
        request : Request
            The request, not yet tokenized.
        on_token : OnToken or None
            Called with each token of the answer, a stored answer in one call.

        Returns
        -------
        Answer
            Text and tokens of the answer, with the record of the request.

        Raises
        ------
        InputError
            The request is invalid.
        ConfigError
            A level has wrong settings.
        ModelError
            The engine refused full computation.
        """
        began = time.perf_counter()
        with retention_scope(request.retention), tracing.span("dejakv.answer") as span:
            answer = self._answer_steadily(request, began, on_token)
            if span is not None:
                span.set_attributes(tracing.present(answer.record.span_attributes))
            return answer

    def _answer_steadily(self, request: Request, began: float, on_token: OnToken | None) -> Answer:
        """Answer a request, again from the start if the model changes meanwhile."""
        for _ in range(_TRIES):
            try:
                return self._answer(self._prepared(request), began, on_token)
            # Nothing was computed. Prepared again, since a changed processor counts tokens
            # in another way.
            except ModelChangedError:
                continue
        # An empty epoch uses no state: a model that changes all the time is still answered.
        return self._answer(replace(self.engine.prepare(request), epoch=""), began, on_token)

    def _answer(self, prepared: Prepared, began: float, on_token: OnToken | None) -> Answer:
        cache = self.cache
        if cache is None or not prepared.epoch:
            unidentified = self.engine.unidentified if cache is not None else ""
            waited_seconds = time.perf_counter() - began
            plan, completion = self.run_plans(
                prepared, (replace(FULL, reason=unidentified),), on_token
            )
            decision, stored = None, False
        else:
            decision = cache.decide(prepared, self.engine)
            waited_seconds = time.perf_counter() - began
            plan, completion = self.run_plans(prepared, decision.plans, on_token)
            if plan.method == "none" and self.engine.no_reuse:
                plan = replace(plan, reason=self.engine.no_reuse)

            stored = cache.keep(prepared, decision, plan, completion)
            # A stored answer ran nothing, so that its prompt is not promoted.
            if self.promotes and plan.answer is None:
                answer_ids = self._unsettled_answer(cache, prepared, plan, completion)
                if plan.approximate or answer_ids:
                    text = completion.text if answer_ids else ""
                    cache.queue.promote(decision, answer_ids, text)

        record = Record.from_completion(
            prepared, decision, plan, completion, waited_seconds, stored
        )
        cached = plan.donors[0].answer if plan.match is not None else None
        return Answer(completion.text, completion.token_ids, record, cached, completion, decision)

    def _unsettled_answer(
        self, cache: HierarchicalCache, prepared: Prepared, plan: Plan, completion: Completion
    ) -> tuple[int, ...]:
        """Return an answer's tokens without the last, if their state is wanted and not stored."""
        answer_ids, tokens = completion.token_ids[:-1], len(prepared.token_ids)
        stored = completion.capture_with_answer is not None and not plan.approximate
        if stored or not (cache.keeps_answers and self.engine.computes_token_ids):
            return ()

        before, after = (
            reusable_tokens(length, length + 1, prepared.prefill_unit, prepared.spans)
            for length in (tokens, tokens + len(answer_ids))
        )
        # In low precision whole prefill units are reused alone.
        return answer_ids if after > before else ()

    def run_plans(
        self, prepared: Prepared, plans: Sequence[Plan], on_token: OnToken | None = None
    ) -> tuple[Plan, Completion]:
        """Run plans, best first, until the engine accepts one.

        Parameters
        ----------
        prepared : Prepared
            The tokenized request.
        plans : Sequence[Plan]
            The last is full computation.
        on_token : OnToken or None
            See `answer`.

        Returns
        -------
        tuple[Plan, Completion]
            The plan that ran, with the reason of the first refusal. Times of the completion count
            from this call.

        Raises
        ------
        ModelError
            The engine refused the last plan.
        """
        store = self.cache.store if self.cache is not None else None
        reason, began = "", time.perf_counter()
        for plan in plans:
            # What refused plans took is time that the caller waited for.
            waited = time.perf_counter() - began

            # The answer itself is stored: nothing runs.
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

            with tracing.span("dejakv.run") as span:
                completion = method_of(plan).run(
                    self.engine, prepared, plan, store, on_token=on_token
                )
                if span is not None:
                    span.set_attributes(tracing.present(_run_attributes(plan, completion)))

            if isinstance(completion, Completion):
                completion = replace(
                    completion,
                    ttft_s=waited + completion.ttft_s,
                    latency_s=waited + completion.latency_s,
                )
                # vLLM's connector sees by itself that a blend is not worth it.
                if completion.exactly:
                    full = completion.computed_tokens == len(prepared.token_ids)
                    plan, reason = (
                        FULL if full else next(each for each in plans if not each.approximate),
                        completion.exactly,
                    )
                return replace(plan, reason=reason) if reason else plan, completion
            reason = reason or completion.reason

        raise ModelError(
            f"the engine {self.engine.name} refused every plan ({reason}): full computation must "
            "not be refused"
        )

    def _prepared(self, request: Request) -> Prepared:
        """Tokenize a request under the engine's epoch, its parts in the order with most reuse."""
        engine, cache, places = self.engine, self.cache, ()
        order = self._order(request) if request.order == "free" else None
        if order is not None and order.changed and cache is not None:
            reordered_tokens, initial_tokens = (
                reusable_tokens(tokens, order.tokens, engine.prefill_unit)
                for tokens in (order.held, order.given)
            )
            costs = cache.costs(engine)
            # Another order may change the answer: only where it makes the prompt faster.
            if costs is None or costs.prefix_saves(reordered_tokens, initial_tokens, order.tokens):
                places, request = order.order, order.reorder(request)

        prepared = engine.prepare(request)
        epoch = (prepared.epoch or engine.epoch) if cache is not None else ""
        return replace(
            prepared, epoch=epoch, order=places, order_s=order.seconds if order is not None else 0.0
        )

    def _order(self, request: Request) -> PartArrangement | None:
        """Order a prompt's parts for the longest stored prefix.

        The result is None where nothing can be reused.
        """
        cache, epoch = self.cache, self.engine.epoch
        if (
            cache is None
            or cache.off
            or request.no_cache
            or not (cache.config.free_order and cache.config.exact_prefix)
            or not epoch
        ):
            return None

        def tokenize(text: str) -> tuple[int, ...]:
            return self.engine.prepare(
                replace(request, prompt=text, parts=(), order="given")
            ).token_ids

        return arrange_frame(request.frame, cache.prefixes(epoch), tokenize, request.partition)

    @property
    def waiting(self) -> int:
        """Number of labels and promotions that wait; 0 without a cache."""
        return len(self.cache.queue) if self.cache is not None else 0

    def settle_one(self) -> bool:
        """Settle one prompt in idle time. False if none waits.

        It labels a would-be hit, else promotes an approximately answered prompt. A label takes up
        to twice the time of its request, a promotion that of the prompt's prefill.

        Returns
        -------
        bool
            Whether there was something to settle.
        """
        return self._settle_with(Settler.settle_one)

    def label_one(self) -> bool:
        """Label the oldest would-be hit for the error bound. False if none waits.

        A failure counts as a wrong answer and is logged.

        Returns
        -------
        bool
            Whether a would-be hit was taken from the queue.
        """
        return self._settle_with(Settler.label_one)

    def promote_one(self) -> bool:
        """Compute the newest waiting prompt exactly and store its state. False if none waits.

        Returns
        -------
        bool
            Whether a prompt was computed, even if it failed.
        """
        return self._settle_with(Settler.promote_one)

    def _settle_with(self, settle_step: Callable[[Settler], bool]) -> bool:
        if self.cache is None:
            return False
        with self._settling, tracing.span("dejakv.settle"):
            return settle_step(Settler(self.engine, self.cache, self.run_plans))

    def stop_settling(self) -> None:
        """End a running label at its next token and label nothing more.

        Later would-be hits are lost.
        """
        if self.cache is not None:
            self.cache.queue.close()

    def purge(self, selection: Selection, *, dry_run: bool = False) -> PurgeResult:
        """Purge the cache, the engine's encoder outputs and its memory of requests.

        It waits for work in idle time, which is not stored; a label ends at its next token. See
        `HierarchicalCache.purge`.

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
        """
        if self.cache is not None and not dry_run:
            # Before waiting for the lock: it has the running label end at its next token.
            self.cache.queue.begin_removal(selection.partition)

        with self._settling:
            purged = (
                self.cache.purge(selection, dry_run=dry_run)
                if self.cache is not None
                else PurgeResult()
            )
            registry = self.engine.encoder_cache
            if registry is not None:
                # After the cache: what was made from its purged entries goes with them.
                purged += registry.purge(selection.for_output_stores(purged), dry_run=dry_run)
            if not dry_run:
                self.engine.forget(selection.partition)
            return purged

    def weights_changed(self) -> None:
        """Let the engine fingerprint its model again, if it can."""
        self.engine.weights_changed()


def _run_attributes(plan: Plan, completion: Completion | Refusal) -> dict[str, Any]:
    """Return a plan and what came of it as attributes of its span."""
    attributes: dict[str, Any] = {"dejakv.method": plan.method, "dejakv.plan": plan.name}
    if isinstance(completion, Refusal):
        return {**attributes, "dejakv.refusal": shorten_reason(completion.reason)}
    return {
        **attributes,
        "dejakv.computed_tokens": completion.computed_tokens,
        "dejakv.loaded_bytes": completion.bytes_loaded,
        "dejakv.inject_seconds": completion.inject_s,
        "dejakv.ttft_seconds": completion.ttft_s,
        "dejakv.encoder_runs": completion.encoder_runs,
    }
