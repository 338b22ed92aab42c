"""Settling in idle time: exact computation of prompts that were, or would have been, answered approximately.

The state is stored for later exact hits (promotion). Under an error bound the exact answer is compared with the approximate one
(a label; an audit if that one was served).
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dejakv.cache import HierarchicalCache
from dejakv.decide.plan import Decision, Plan
from dejakv.decide.queue import LabelTask
from dejakv.engines.base import Completion, Engine, OnToken, Prepared
from dejakv.errors import ModelChangedError
from dejakv.request import Sampling, after_waiting, keeping
from dejakv.store.budgets import now
from dejakv.trust.differs import ComparedAnswer
from dejakv.trust.features import certainty

logger = logging.getLogger("dejakv.trust")

Run = Callable[[Prepared, Sequence[Plan], OnToken | None], tuple[Plan, Completion]]
"""Runs the first plan that the engine does not refuse; see `Pipeline.run_plans`."""


SECONDS = 600.0
"""Most seconds for all runs of one label. It counts as wrong beyond: else slow requests would be left out."""


class _LabelImpossible(Exception):
    """No label can be made, for a reason independent of the outcome."""


class _CacheClosed(Exception):
    """The cache was closed during a label. Counts as wrong: else slow answers would be left out."""


class Settler:
    """Settles the queue of a cache with an idle engine.

    clock  monotonic seconds, for the time limit of a label
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
        """Label a would-be hit, else promote a prompt. False if none waits."""
        return self.label_one() or self.promote_one()

    def promote_one(self) -> bool:
        """Compute the newest waiting prompt exactly and store its state. False if none waits.

        Skips prompts with stored exact state or of another model. A failure is counted and logged, and its prompt dropped.
        """
        cache = self._cache
        # Before the prompt is taken: a purge from here on keeps its state from being stored.
        removal_mark = cache.queue.mark()
        while (waiting := cache.queue.take_promotion()) is not None:
            if cache.store.meta(waiting.key) is None and waiting.epoch == self._engine.epoch:
                done, request = False, waiting.request
                try:
                    with keeping(ttl=request.ttl):  # nothing is promoted of a request of which nothing is kept
                        prepared = replace(self._engine.prepare(request), epoch=waiting.epoch)
                        decision, completion = self._exactly(prepared, None)
                        done = cache.keep_exact(decision, completion, removal_mark=removal_mark)
                except Exception:  # nobody waits for it: what goes wrong must not reach a request that comes next
                    logger.exception("a prompt could not be computed in idle time")
                cache.finder.counts.promotion(request.partition, done)
                return True

        return False

    def label_one(self) -> bool:
        """Label the oldest hit. False if none waits.

        A label is lost if its runs cannot begin: the donor is gone, or another model runs. Once begun, a failure, a timeout or a closed
        cache counts as a wrong answer, and is logged.
        """
        queue = self._cache.queue
        removal_mark = queue.mark()
        label = queue.take_label()
        if label is None:
            return False

        tried: dict[str, float] = {}
        try:
            wrong = self._judged(label, tried, removal_mark)
        except (_LabelImpossible, ModelChangedError):
            queue.lose(label)
            return True
        except _CacheClosed:
            wrong = True
        except Exception as error:  # nobody waits for it: what goes wrong must not reach a request that comes next
            logger.warning("a label failed and counts as wrong: %s: %s", type(error).__name__, error, exc_info=error)
            wrong = True
        except BaseException:  # the process is being ended
            queue.learn(label, True)
            raise

        queue.learn(label, wrong, tried)
        return True

    def _judged(self, label: LabelTask, tried: dict[str, float], removal_mark: int) -> bool:
        """Whether the approximate answer is wrong. `tried` is filled with features of the approximate plan's first token;
        `removal_mark`: `queue.mark()` when the hit was taken.
        """
        trial, cache, queue = label.decision.trial, self._cache, self._cache.queue
        differs, served = queue.differs, label.draw.served
        assert trial is not None
        assert differs is not None
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

        request = after_waiting(label.request, now() - label.came)
        request = replace(request, sampling=Sampling(differs.tokens or request.sampling.max_new_tokens))
        with keeping(no_store=request.no_store, ttl=request.ttl):
            prepared = replace(self._engine.prepare(request), epoch=label.epoch)
            if full is None:
                decision, completion = self._exactly(prepared, go_on)
                if not request.no_store:
                    cache.keep_exact(decision, completion, removal_mark=removal_mark)
                full = seen(completion)
            if reused is None:
                prefix = label.decision.found.prefix
                engine = self._engine.apart(prefix[0].tokens if prefix is not None else 0)
                plan = replace(trial.plan, accept=look)
                ran = engine.run(prepared, plan, cache.store, on_token=go_on)
                # The engine declined the plan, so that there is no approximate answer to judge.
                if not isinstance(ran, Completion) or ran.exactly:
                    raise _LabelImpossible
                reused = seen(ran)
        # Once more: the last run may have ended without another token.
        go_on(0, "")
        return differs.wrong(label.request, full, reused)

    def _exactly(self, prepared: Prepared, on_token: OnToken | None) -> tuple[Decision, Completion]:
        """Compute in full, or from the exact prefix."""
        decision = self._cache.exactly(prepared, self._engine)
        return decision, self._run(prepared, decision.plans, on_token)[1]


def seen(completion: Completion) -> ComparedAnswer:
    """The parts of an answer to compare."""
    return ComparedAnswer(completion.text, completion.token_ids, completion.continued)
