"""Settling in idle time: exact computation of prompts with an approximate answer.

Prompts whose approximate answer was not served are settled as well. The state is stored for later
exact hits (promotion). Under an error bound the exact answer is also compared with the approximate
one: a label, or an audit if the approximate answer was served.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dejakv.cache import HierarchicalCache
from dejakv.decide.method import method_of
from dejakv.decide.plan import Decision, PiecewisePlan, Plan
from dejakv.decide.queue import LabelTask, PromotionTask
from dejakv.engines.base import Completion, Engine, OnToken, Prepared
from dejakv.errors import ModelChangedError
from dejakv.identity import exact_key
from dejakv.request import Retention, Sampling, after_waiting, retention_scope
from dejakv.store.budgets import now
from dejakv.trust.differs import ComparedAnswer
from dejakv.trust.features import certainty

logger = logging.getLogger("dejakv.trust")

Run = Callable[[Prepared, Sequence[Plan], OnToken | None], tuple[Plan, Completion]]
"""Runs the first plan that the engine does not refuse; see `Pipeline.run_plans`."""


SECONDS = 600.0
"""Longest time of all runs of one label, in seconds.

A label that takes longer counts as wrong: else slow requests would be left out.
"""


class _LabelImpossible(Exception):
    """No label can be made, for a reason independent of the outcome."""


class _CacheClosed(Exception):
    """The cache was closed during a label.

    The label counts as wrong: else slow answers would be left out.
    """


class Settler:
    """Labels hits under an error bound and computes waiting prompts exactly, one task a call.

    The owner calls `settle_one` while the engine is idle. A label compares the approximate answer
    with the exact one, whichever of them was served.

    Parameters
    ----------
    engine : Engine
        Computes the answers to compare and the exact state.
    cache : HierarchicalCache
        Has the queue of waiting tasks, and stores the exact state.
    run : Run
        Runs the first plan that the engine does not refuse.
    clock : Callable[[], float]
        Returns monotonic seconds; a label may take `SECONDS` of them.
    """

    def __init__(
        self,
        engine: Engine,
        cache: HierarchicalCache,
        run: Run,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._run = run
        self._clock = clock

    def settle_one(self) -> bool:
        """Label a would-be hit, else promote a prompt; return False if none waits."""
        return self.label_one() or self.promote_one()

    def promote_one(self) -> bool:
        """Compute the newest waiting prompt exactly and store its state; False if none waits.

        Prompts with stored exact state (and no answer to settle), or of another model, are dropped
        without a run. A failure is counted and logged, and its prompt dropped.
        """
        cache = self._cache
        # Before the prompt is taken: a purge from here on keeps its state from being stored.
        removal_mark = cache.queue.mark()
        while (waiting := cache.queue.take_promotion()) is not None:
            unsettled = waiting.answer_ids or cache.store.meta(waiting.key) is None
            if unsettled and waiting.epoch == self._engine.epoch:
                done: bool | None = False
                request = waiting.request
                try:
                    # Only `ttl`: a request of which nothing is kept never waits for a promotion.
                    with retention_scope(Retention(ttl=request.ttl)):
                        done = self._promote(waiting, removal_mark)
                # Nobody waits for it: a failure must not reach a request that comes next.
                except Exception:
                    logger.exception("a prompt could not be computed in idle time")
                if done is None:
                    continue
                cache.finder.counts.count_promotion(request.partition, done)
                return True

        return False

    def _promote(self, waiting: PromotionTask, removal_mark: int) -> bool | None:
        """Store the exact state of a prompt and, behind it, of its answer.

        Returns
        -------
        bool or None
            Whether any was stored; None if all of it was stored already, and nothing was computed.
        """
        cache, done = self._cache, False
        prepared = replace(self._engine.prepare(waiting.request), epoch=waiting.epoch)
        token_ids = (*prepared.token_ids, *waiting.answer_ids)
        digests = [span.digest for span in prepared.spans]
        key = exact_key(prepared.request.partition, prepared.epoch, token_ids, digests)
        prompt_is_stored = cache.store.meta(waiting.key) is not None
        if prompt_is_stored and cache.store.meta(key) is not None:
            return None
        if not prompt_is_stored:
            decision, completion = self._compute_exact(prepared, None)
            done = cache.keep_exact(decision, completion, removal_mark=removal_mark)

        if waiting.answer_ids:
            # As a prompt's: exact whatever the answer was decoded from, and in low precision too.
            prepared = replace(prepared, token_ids=token_ids, inputs=None)
            decision, completion = self._compute_exact(prepared, None)
            kept = cache.keep_with_answer(
                decision.entry, waiting.answer_text, completion, removal_mark=removal_mark
            )
            done = kept or done
        return done

    def label_one(self) -> bool:
        """Label the oldest hit; return False if none waits.

        A label is lost if a donor is gone, another model runs, the engine declines the plan, or a
        purge begins meanwhile. A failure or a timeout counts as a wrong answer and is logged; so
        counts a cache that is closed during the runs.
        """
        queue = self._cache.queue
        removal_mark = queue.mark()
        label = queue.take_label()
        if label is None:
            return False

        tried: dict[str, float] = {}
        try:
            wrong = self._judge(label, tried, removal_mark)
        except (_LabelImpossible, ModelChangedError):
            queue.lose(label)
            return True
        except _CacheClosed:
            wrong = True
        # As above: nobody waits for it.
        except Exception as error:
            logger.warning(
                "a label failed and counts as wrong: %s: %s",
                type(error).__name__,
                error,
                exc_info=error,
            )
            wrong = True
        # The process is being ended.
        except BaseException:
            queue.learn(label, True)
            raise

        queue.learn(label, wrong, tried)
        return True

    def _judge(self, label: LabelTask, tried: dict[str, float], removal_mark: int) -> bool:
        """Tell whether the approximate answer is wrong.

        Parameters
        ----------
        label : LabelTask
            The hit.
        tried : dict[str, float]
            Filled with features of the approximate plan's first token.
        removal_mark : int
            `queue.mark()` when the hit was taken.
        """
        trial, cache, queue = label.decision.trial, self._cache, self._cache.queue
        differs, served = queue.differs, label.draw.served
        assert trial is not None
        assert differs is not None

        # One of the two answers exists already: the one that the caller got.
        full, reused = (None, label.answer) if served else (label.answer, None)
        at_hand = all(cache.store.meta(donor.id) is not None for donor in trial.plan.donors)
        if label.epoch != self._engine.epoch or (reused is None and not at_hand):
            raise _LabelImpossible  # a plan without some of its donors is another plan

        deadline = self._clock() + SECONDS
        partition = label.request.partition

        def go_on(_token: int, _text: str) -> None:
            if queue.removed_since(removal_mark, partition):
                raise _LabelImpossible
            if queue.closed:
                raise _CacheClosed
            if self._clock() > deadline:
                raise TimeoutError(f"more than {SECONDS:g} seconds")

        def look(logs: NDArray[np.float32]) -> str:
            tried.update(certainty(logs))
            return ""

        # The time in the queue counts against the request's own limit of storage.
        request = after_waiting(label.request, now() - label.came)
        request = replace(
            request, sampling=Sampling(differs.tokens or request.sampling.max_new_tokens)
        )

        with retention_scope(request.retention):
            prepared = replace(self._engine.prepare(request), epoch=label.epoch)
            if full is None:
                decision, completion = self._compute_exact(prepared, go_on)
                if not request.no_store:
                    cache.keep_exact(decision, completion, removal_mark=removal_mark)
                full = comparable_answer(completion)

            if reused is None:
                prefix = label.decision.donor_search.prefix
                engine = self._engine.without_own_state(
                    prefix[0].tokens if prefix is not None else 0
                )
                plan = trial.plan
                if isinstance(plan, PiecewisePlan):
                    plan = replace(plan, accept=look)
                ran = method_of(plan).run(engine, prepared, plan, cache.store, on_token=go_on)
                # The engine declined the plan, so that there is no approximate answer to judge.
                if not isinstance(ran, Completion) or ran.exactly:
                    raise _LabelImpossible
                reused = comparable_answer(ran)

        # Once more: the last run may have ended without another token.
        go_on(0, "")
        return differs.wrong(label.request, full, reused)

    def _compute_exact(
        self, prepared: Prepared, on_token: OnToken | None
    ) -> tuple[Decision, Completion]:
        """Compute in full, or from the exact prefix."""
        decision = self._cache.decide_exact(prepared, self._engine)
        return decision, self._run(prepared, decision.plans, on_token)[1]


def comparable_answer(completion: Completion) -> ComparedAnswer:
    """Return the parts of an answer that are compared."""
    return ComparedAnswer(completion.text, completion.token_ids, completion.continued)
