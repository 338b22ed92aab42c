"""What a pipeline does in idle time, behind requests: it labels would-be hits for the error bound, and computes prompts exactly that
were answered approximately."""

import copy
import logging
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import replace

from dejakv.answers import FirstToken
from dejakv.cache import HierarchicalCache
from dejakv.engines.base import Completion, Engine, Prepared, RunsApart, costs_of
from dejakv.find.decision import Decision
from dejakv.find.ways import Plan
from dejakv.labelling import Labeller
from dejakv.request import Request
from dejakv.retention import keeping

logger = logging.getLogger("dejakv")


class Errands(ABC):
    """The part of a pipeline that its owner calls when nothing else runs."""

    engine: Engine
    cache: HierarchicalCache | None
    _errand: threading.Lock
    """Held while one runs: a purge waits for it."""

    @abstractmethod
    def _run(self, prepared: Prepared, chosen: Plan, decision: Decision, clock: FirstToken) -> tuple[Completion, Plan]:
        """Runs the plan; where the donor's state cannot be used, the next plainer one. Returns what was run in the end."""

    @property
    def waiting(self) -> int:
        """How much waits for `run_errand`."""
        cache = self.cache
        if cache is None:
            return 0
        return len(cache.promotions) + (len(cache.audits) if cache.audits is not None else 0)

    def run_errand(self) -> bool:
        """Does one of the things that wait for idle time: labels a would-be hit, or else promotes a prompt. False if none waits."""
        return self.label_one() or self.promote_one()

    def stop_errands(self) -> None:
        """Ends a label that is being made at its next token; from now on would-be hits are lost, and nothing is labelled."""
        if self.cache is not None and self.cache.audits is not None:
            self.cache.audits.close()

    def label_one(self) -> bool:
        """Labels the would-be hit that waits longest, for the error bound. False if none waits.

        For idle time: it takes up to twice as long as the request took. A failure counts as a wrong answer and is logged.
        """
        if self.cache is None:
            return False
        with self._errand:
            return Labeller(self.engine, self.cache, self._run, self._run_apart).label_one()

    def promote_one(self) -> bool:
        """Computes a waiting prompt exactly and stores its state, so that it is hit exactly when it comes again. False if none waits.

        For idle time: it takes as long as the prompt's prefill. Prompts whose exact state has arrived meanwhile, or that
        another model answered, are passed over. A failure is counted and logged, and the prompt forgotten.
        """
        if self.cache is None:
            return False
        with self._errand:
            return self._promote_one(self.cache)

    def _promote_one(self, cache: HierarchicalCache) -> bool:
        begun = cache.removals.mark()
        while (waiting := cache.promotions.take()) is not None:
            if cache.store.meta(waiting.key) is None and waiting.epoch == self.engine.epoch:
                done = False
                try:
                    done = self._promote(cache, waiting.request, waiting.epoch, begun)
                except Exception:  # nobody waits for it: what goes wrong must not reach a request that comes next
                    logger.exception("a prompt could not be computed in idle time")
                cache.finder.counts.promotion(waiting.request.partition, done)
                return True
        return False

    def _promote(self, cache: HierarchicalCache, request: Request, epoch: str, begun: int) -> bool:
        """Whether the prompt's exact state was handed to the writer."""
        with keeping(ttl=request.ttl):  # nothing is promoted of a request of which nothing is kept
            prepared = replace(self.engine.prepare(request), epoch=epoch)
            decision = cache.finder.exactly(prepared, costs=costs_of(self.engine, cache.config.costs))
            completion, _ = self._run(prepared, decision.plan, decision, FirstToken(time.perf_counter(), None))
            return cache.keep(prepared, decision, completion, begun=begun)

    def _run_apart(
        self, prepared: Prepared, chosen: Plan, decision: Decision, clock: FirstToken
    ) -> tuple[Completion, Plan]:
        """The same as if the prompt had not been computed since the decision, which an engine that holds state must be told."""
        if not isinstance(self.engine, RunsApart):
            return self._run(prepared, chosen, decision, clock)
        prefix = decision.found.prefix
        other = copy.copy(self)
        other.engine = self.engine.apart(prefix[0].tokens if prefix is not None else 0)
        return other._run(prepared, chosen, decision, clock)
