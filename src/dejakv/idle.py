"""Idle time: prompts are settled when nothing else runs.

To settle a prompt is to compute it exactly. Its state is stored, so that it is hit exactly when it comes again (promotion); under an
error bound its answer is compared with the approximate one that was, or would have been, served (a label, or of a served one an audit).
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dejakv.cache import HierarchicalCache
from dejakv.decide.plan import Decision, Plan
from dejakv.engines.base import Completion, Engine, OnToken, Prepared
from dejakv.errors import ModelChangedError
from dejakv.records import greedy_answer
from dejakv.request import Request, Sampling, after_waiting, keeping
from dejakv.store.age import now
from dejakv.store.base import ChunkMeta
from dejakv.trust.audits import SECONDS, Audit, Audits
from dejakv.trust.differs import Differs, Seen
from dejakv.trust.features import certainty

logger = logging.getLogger("dejakv.trust")

Run = Callable[[Prepared, Sequence[Plan], OnToken | None], tuple[Plan, Completion]]
"""Runs the first plan that the engine does not refuse; see `Pipeline.run_plans`."""


class _Unlabelled(Exception):
    """There is no label, for a reason that the outcome has no part in."""


class _OutOfTime(Exception):
    """The runs of a label take too long."""


class _Stopped(Exception):
    """The cache was closed while a label was made. The answer counts as wrong: else slow answers would be left out."""


class Settler:
    """Settles what waits in a cache's `audits` and `promotions`, with an engine that is free.

    seconds  for which the runs of one label may take, by `clock`, which must not jump
    """

    def __init__(
        self,
        engine: Engine,
        cache: HierarchicalCache,
        run: Run,
        *,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._run = run
        self._seconds = seconds
        self._clock = clock

    def settle_one(self) -> bool:
        """Labels a would-be hit, or else computes an approximately answered prompt. False if none waits."""
        return self.label_one() or self.promote_one()

    def promote_one(self) -> bool:
        """Computes the newest prompt that waits in `promotions`, and stores its state. False if none waits.

        Prompts whose exact state has arrived meanwhile, or that another model answered, are passed over. A failure is counted and
        logged, and the prompt forgotten.
        """
        cache = self._cache
        begun = cache.removals.mark()
        while (waiting := cache.promotions.take()) is not None:
            if cache.store.meta(waiting.key) is None and waiting.epoch == self._engine.epoch:
                done, request = False, waiting.request
                try:
                    with keeping(ttl=request.ttl):  # nothing is promoted of a request of which nothing is kept
                        prepared = replace(self._engine.prepare(request), epoch=waiting.epoch)
                        decision, completion = self._exactly(prepared, None)
                        done = cache.keep_exact(prepared, decision, completion, begun=begun)
                except Exception:  # nobody waits for it: what goes wrong must not reach a request that comes next
                    logger.exception("a prompt could not be computed in idle time")
                cache.finder.counts.promotion(request.partition, done)
                return True
        return False

    def label_one(self) -> bool:
        """Labels the hit that waits longest. False if none waits.

        A label that could not be made is lost if its runs never began: the donor is gone, another model runs. If they began and
        failed, took too long or did not finish before the cache was closed, the answer counts as wrong, and the log says why.
        """
        audits, begun = self._cache.audits, self._cache.removals.mark()
        audit = audits.take() if audits is not None else None
        if audits is None or audit is None:
            return False
        tried: dict[str, float] = {}
        reused: Seen | None = None
        try:
            wrong, reused = self._judged(audit, audits, tried, begun)
        except (_Unlabelled, ModelChangedError):
            audits.lose(audit)
            return True
        except _Stopped:
            wrong = True
        except Exception as error:  # nobody waits for it: what goes wrong must not reach a request that comes next
            logger.warning("a label failed and counts as wrong: %s: %s", type(error).__name__, error, exc_info=error)
            wrong = True
        except BaseException:  # the process is being ended
            audits.learn(audit, True)
            raise
        audits.learn(audit, wrong, tried, reused)
        return True

    def _judged(
        self, audit: Audit[Decision], audits: Audits[Decision], tried: dict[str, float], begun: int
    ) -> tuple[bool, Seen]:
        """Whether the approximate answer is wrong, and that answer. `tried` gets what the approximate plan's first token shows;
        `begun`: `removals.mark()` when the hit was taken."""
        trial, cache = audit.decision.trial, self._cache
        assert trial is not None
        differs, served = audits.differs, audit.draw.served
        full = None if served else audit.answer
        reused = audit.answer if served else _of_donor(trial.plan, audit.request, differs)
        at_hand = all(cache.store.meta(donor.id) is not None for donor in trial.plan.donors)
        if audit.epoch != self._engine.epoch or (reused is None and not at_hand):
            raise _Unlabelled  # a plan without some of its donors is another plan
        until = self._clock() + self._seconds
        removals, partition = cache.removals, audit.request.partition

        def go_on(_token: int, _text: str) -> None:
            if removals.since(begun, partition):
                raise _Unlabelled
            if audits.closed:
                raise _Stopped
            if self._clock() > until:
                raise _OutOfTime(f"more than {self._seconds:g} seconds")

        def look(logs: NDArray[np.float32]) -> str:
            tried.update(certainty(logs))
            return ""

        request = after_waiting(audit.request, now() - audit.came)
        request = replace(request, sampling=Sampling(differs.tokens or request.sampling.max_new_tokens))
        with keeping(no_store=request.no_store, ttl=request.ttl):
            prepared = replace(self._engine.prepare(request), epoch=audit.epoch)
            if full is None:
                decision, completion = self._exactly(prepared, go_on)
                wanted = not request.no_store and cache.store.meta(decision.key) is None
                if wanted and cache.keep_exact(prepared, decision, completion, begun=begun):
                    cache.promotions.forget(decision.key)
                full = seen(completion)
            if reused is None:
                prefix = audit.decision.found.prefix
                engine = self._engine.apart(prefix[0].tokens if prefix is not None else 0)
                plan = replace(trial.plan, accept=look)
                ran = engine.run(prepared, plan, cache.store, on_token=go_on)
                if not isinstance(ran, Completion) or ran.exactly:
                    raise _Unlabelled
                reused = seen(ran)
        go_on(0, "")
        return differs.wrong(audit.request, full, reused), reused

    def _exactly(self, prepared: Prepared, on_token: OnToken | None) -> tuple[Decision, Completion]:
        """Full computation, behind the exact prefix if there is one."""
        decision = self._cache.exactly(prepared, self._engine)
        return decision, self._run(prepared, decision.plans, on_token)[1]


def seen(completion: Completion) -> Seen:
    """An answer as it is compared."""
    return Seen(completion.text, completion.token_ids, completion.continued, completion.computed_tokens)


def _of_donor(plan: Plan, request: Request, differs: Differs) -> Seen | None:
    """The answer of an adopted donor, which is stored with it: the model would say the same again."""
    if plan.method != "adopt" or differs.logits:
        return None
    return _stored(plan.donors[0], differs.tokens or request.sampling.max_new_tokens)


def _stored(donor: ChunkMeta, tokens: int) -> Seen | None:
    """A donor's stored answer, if it is the greedy one of at most so many tokens; of one token the text is left out."""
    length, first = greedy_answer(donor.metadata)
    if length is None or donor.answer is None:
        return None
    if tokens == 1:
        return Seen("", first)
    return Seen(donor.answer, first) if length == tokens else None
