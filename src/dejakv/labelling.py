"""The label of a would-be hit: the way that was not taken is run behind the request, and both answers are compared."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dejakv.answers import FirstToken
from dejakv.cache import HierarchicalCache
from dejakv.engines.base import Completion, Engine, Prepared, costs_of
from dejakv.errors import ModelChangedError
from dejakv.find.bound import BOUND
from dejakv.find.decision import Decision, Trial
from dejakv.find.ways import Plan
from dejakv.records import greedy_answer
from dejakv.request import Request, Sampling
from dejakv.retention import after_waiting, keeping
from dejakv.store.age import now
from dejakv.store.base import ChunkMeta
from dejakv.trust.audits import SECONDS, Audit, Audits
from dejakv.trust.certainty import certainty
from dejakv.trust.differs import Differs, Seen
from dejakv.trust.draw import Draw

logger = logging.getLogger("dejakv.trust")

Run = Callable[[Prepared, Plan, Decision, FirstToken], tuple[Completion, Plan]]
"""Runs a plan; see `Pipeline`."""


class Attempt:
    """One request under an error bound, from its decision to its answer. Without a bound it does nothing.

    decision  as it was made, and with the draw once there is one
    """

    def __init__(self, cache: HierarchicalCache, prepared: Prepared, decision: Decision) -> None:
        self.decision = decision
        self._audits = cache.audits
        self._prepared = prepared
        trial = decision.trial
        if trial is not None and trial.draw is not None:
            self._note(trial.draw)
        elif trial is not None:
            self.decision = replace(decision, trial=replace(trial, accept=self._accept))

    def answered(self, completion: Completion, ran: Plan) -> None:
        """What the request was answered, by the plan that ran in the end."""
        trial, audits = self.decision.trial, self._audits
        if trial is not None and trial.draw is not None and audits is not None:
            answer = known(self._prepared.request, completion, audits.differs)
            audits.answered(trial.draw, answer, approximate=ran.approximate)

    def _accept(self, logs: NDArray[np.float32]) -> str:
        """Draws for a plan that was tried. Its label waits from before anybody has seen a token."""
        trial = self.decision.trial
        assert trial is not None
        assert trial.judge is not None
        draw = trial.judge(certainty(logs))
        self.decision = replace(self.decision, trial=Trial(trial.plan, draw))
        self._note(draw)
        return "" if draw.served else f"{BOUND}: {draw.reason}"

    def _note(self, draw: Draw) -> None:
        if self._audits is not None:
            self._audits.note(draw, self._prepared.request, self._prepared.epoch, self.decision)


class _Unlabelled(Exception):
    """There is no label, for a reason that the outcome has no part in."""


class _OutOfTime(Exception):
    """The runs of a label take too long."""


class _Stopped(Exception):
    """The cache was closed while a label was made. The answer counts as wrong: else slow answers would be left out."""


class Labeller:
    """Labels hits that wait in `cache.audits`, with an engine that is free.

    run        runs a plan
    run_apart  runs one as if the prompt had not been computed since it was made
    seconds    for which the runs of one label may take, by `clock`, which must not jump
    """

    def __init__(
        self,
        engine: Engine,
        cache: HierarchicalCache,
        run: Run,
        run_apart: Run,
        *,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._run = run
        self._run_apart = run_apart
        self._seconds = seconds
        self._clock = clock

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
        """Whether the approximate answer is wrong, and that answer. `tried`: gets what the approximate plan's first token shows. `begun`: `removals.mark()` when the hit was taken."""
        trial = audit.decision.trial
        assert trial is not None
        differs, served = audits.differs, audit.draw.served
        full = None if served else audit.answer
        reused = audit.answer if served else _of_donor(trial.plan, audit.request, differs)
        if audit.epoch != self._engine.epoch or (reused is None and not self._at_hand(trial.plan)):
            raise _Unlabelled
        until = self._clock() + self._seconds
        removals, partition = self._cache.removals, audit.request.partition

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
                full = self._in_full(prepared, FirstToken(time.perf_counter(), go_on), begun)
            if reused is None:
                decision = replace(audit.decision, trial=replace(trial, accept=look))
                clock = FirstToken(time.perf_counter(), go_on)
                completion, ran = self._run_apart(prepared, trial.plan, decision, clock)
                if not ran.approximate:
                    raise _Unlabelled
                reused = seen(completion)
        go_on(0, "")
        return differs.wrong(audit.request, full, reused), reused

    def _in_full(self, prepared: Prepared, clock: FirstToken, begun: int) -> Seen:
        """The answer of full computation, behind the exact prefix if there is one. Its state is stored for the time that its request
        has left, so that the prompt is hit exactly when it comes again."""
        cache = self._cache
        decision = cache.finder.exactly(prepared, costs=costs_of(self._engine, cache.config.costs))
        completion, _ = self._run(prepared, decision.plan, decision, clock)
        wanted = not prepared.request.no_store and cache.store.meta(decision.key) is None
        if wanted and cache.keep(prepared, decision, completion, begun=begun):
            cache.promotions.forget(decision.key)
        return seen(completion)

    def _at_hand(self, plan: Plan) -> bool:
        """Whether all donors are still stored: a plan without some of them is another plan."""
        return all(self._cache.store.meta(donor.id) is not None for donor in plan.donors)


def seen(completion: Completion) -> Seen:
    """An answer as it is compared."""
    return Seen(completion.text, completion.token_ids, completion.continued, completion.computed_tokens)


def known(request: Request, completion: Completion, differs: Differs) -> Seen | None:
    """What a request was answered, if that is greedy and all that is compared; it holds on to no state."""
    sampling = request.sampling
    if differs.logits or not sampling.greedy or sampling.num_beams != 1:
        return None
    return Seen(completion.text, completion.token_ids)


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
