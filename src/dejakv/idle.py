"""Idle time: prompts are settled when nothing else runs.

To settle a prompt is to compute it exactly. Its state is stored, so that it is hit exactly when it comes again (promotion); under an
error bound its answer is compared with the approximate one that was, or would have been, served (a label, or of a served one an audit).
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from dejakv.decide.plan import Decision, Plan
from dejakv.engines.base import Completion, Engine, OnToken, Prepared
from dejakv.errors import ModelChangedError
from dejakv.records import greedy_answer
from dejakv.request import Request, Sampling, after_waiting, keeping
from dejakv.store.age import now
from dejakv.trust.differs import Differs, Seen
from dejakv.trust.draw import Draw
from dejakv.trust.features import certainty
from dejakv.trust.gate import Gate

if TYPE_CHECKING:
    from dejakv.cache import HierarchicalCache

logger = logging.getLogger("dejakv.trust")

Run = Callable[[Prepared, Sequence[Plan], OnToken | None], tuple[Plan, Completion]]
"""Runs the first plan that the engine does not refuse; see `Pipeline.run_plans`."""


MOST_LABELS, MOST_PROMOTIONS = 256, 64
"""Would-be hits that wait for their label, and prompts that wait to be computed exactly, at once."""

MOST_BYTES = 64 << 20
"""Bytes of text and pictures of what waits, of each kind."""

SECONDS = 600.0
"""How long the runs of one label may take, together. It counts as wrong then: else slow requests would be left out."""

PREFILL = Sampling(max_new_tokens=1)
"""An answer of one token: it is the state that is wanted."""


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """A prompt that was answered approximately, by its exact key.

    epoch  of the model that answered it
    came   seconds since 1970 in which it was asked
    ttl    seconds from then on for which it may wait and its state be used, 0 without a limit
    """

    key: str
    request: Request
    epoch: str
    came: float
    ttl: float = 0.0

    @property
    def nbytes(self) -> int:
        request = self.request
        return len(request.prompt) + len(request.chunk) + sum(len(item.data) for item in request.media)


@dataclass(frozen=True, kw_only=True)
class Label(Promotion):
    """A would-be hit that waits for its label, by the id of its draw: the way that was not taken is to run. A *shadow* was answered in
    full, an *audit* approximately.

    decision  how it was to be run
    answer    what was answered, if that is one of the two answers to be compared; None: both must run
    """

    draw: Draw
    decision: Decision
    answer: Seen | None = None


@dataclass(frozen=True)
class QueueCounts:
    """What waits now, `labels` None without an error bound, and promotions `dropped` since the start for want of room."""

    labels: int | None = None
    promotions: int = 0
    dropped: int = 0


W = TypeVar("W", bound=Promotion)


class SettlingQueue:
    """What waits to be settled, in bounds, and the removals that such work heeds. Thread-safe.

    gate, differs  of an error bound, which learns from labels; without them nothing is labelled

    The oldest label is made first, since labels count in the order of their draws. If there is no room the oldest is lost, a shadow before
    any audit, since an audit that is lost counts as wrong: it stays or goes by what comes after it, and not by its own outcome. A request
    that alone is too large waits alone. Of promotions the newest is made first, and the oldest are dropped: they stay approximate until
    they come again.
    """

    def __init__(self, gate: Gate | None = None, differs: Differs | None = None) -> None:
        self.gate = gate
        self.differs = differs
        self.closed = False
        """Whether nothing is to be labelled any more."""
        self._labels: dict[str, Label] = {}
        self._promotions: dict[str, Promotion] = {}
        self._dropped = 0
        self._removals: list[str | None] = []
        self._lock = threading.Lock()

    def label(self, draw: Draw, request: Request, epoch: str, decision: Decision) -> None:
        """A labelled draw waits from before its request runs: a client who leaves when it sees the answer changes nothing."""
        if not draw.labelled:
            return
        label = Label(key=draw.id, request=request, epoch=epoch, came=now(), draw=draw, decision=decision)
        waiting = self._labels
        lost: list[Label] = []
        with self._lock:
            if self.closed:
                lost = [label]
            else:
                waiting[draw.id] = label
                while len(waiting) > 1 and _full(waiting, MOST_LABELS):
                    shadows = (id for id, other in waiting.items() if not other.draw.served and id != draw.id)
                    lost.append(waiting.pop(next(shadows, next(iter(waiting)))))
        self._lose(lost)

    def answered(self, draw: Draw, answer: Seen | None, *, approximate: bool) -> None:
        """What the request was answered, None where both answers must run; `approximate`: whether that was approximately. A plan to
        reuse that ended in an exact answer is no approximate answer, and nothing that is labelled."""
        with self._lock:
            label = self._labels.get(draw.id)
            if label is None:
                return
            if approximate == draw.served:
                self._labels[draw.id] = replace(label, answer=answer)
                return
            del self._labels[draw.id]
        self._lose(
            [replace(label, draw=replace(draw, served=False))]
        )  # nothing approximate was served that could be wrong

    def take_label(self) -> Label | None:
        """The oldest, which waits no longer; None if there is none. Its taker calls `learn` or `lose`."""
        with self._lock:
            return self._labels.pop(next(iter(self._labels))) if self._labels else None

    def learn(self, label: Label, wrong: bool, tried: Mapping[str, float] | None = None) -> None:
        """The outcome of one that was taken. `tried`: what running its plan showed, for a late draw."""
        assert self.gate is not None
        self.gate.learn(label.draw, wrong, tried)

    def lose(self, label: Label) -> None:
        """One that was taken cannot be labelled, for a reason that its outcome has no part in: see `Gate.lost`."""
        assert self.gate is not None
        self.gate.lost(label.draw)

    def promote(self, decision: Decision) -> None:
        """The prompt was answered approximately. One that waits already becomes the newest. Nothing waits of a request of which nothing
        is kept."""
        if decision.ask.no_store:
            return
        entry, waiting = decision.entry, self._promotions
        request = replace(decision.query.request, sampling=PREFILL, metadata={})
        with self._lock:
            waiting.pop(entry.id, None)
            waiting[entry.id] = Promotion(key=entry.id, request=request, epoch=entry.epoch, came=now(), ttl=entry.ttl)
            while _full(waiting, MOST_PROMOTIONS):
                del waiting[next(iter(waiting))]
                self._dropped += 1

    def take_promotion(self) -> Promotion | None:
        """The newest, which waits no longer; None if there is none. Its request may keep its state for the time that is left of its own."""
        with self._lock:
            while self._promotions:
                _, item = self._promotions.popitem()
                left = item.came + item.ttl - now()
                if not item.ttl:
                    return item
                if left > 0:
                    return replace(item, request=replace(item.request, ttl=left))
            return None

    def removing(self, partition: str | None) -> None:
        """A purge or clearing begins, of a partition or of all: work that began before it is not stored."""
        self._removals.append(partition)

    def mark(self) -> int:
        """Now, for `removed_since`. Taken before it is known of which partition the work will be."""
        return len(self._removals)

    def removed_since(self, mark: int, partition: str) -> bool:
        """Whether a removal that may concern the partition has begun after the mark."""
        return any(removed in (None, partition) for removed in self._removals[mark:])

    def clear(self, partition: str | None) -> None:
        """Forgets one partition's requests, None for all: labels are lost."""
        with self._lock:
            lost = _popped(self._labels, partition)
            _popped(self._promotions, partition)
        self._lose(lost)

    def close(self) -> None:
        """Whatever waits for its label is lost, and what comes later."""
        with self._lock:
            self.closed = True
            lost = _popped(self._labels, None)
        self._lose(lost)

    @property
    def counts(self) -> QueueCounts:
        with self._lock:
            labels = len(self._labels) if self.gate is not None else None
            return QueueCounts(labels, len(self._promotions), self._dropped)

    def __len__(self) -> int:
        return len(self._labels) + len(self._promotions)

    def _lose(self, labels: Sequence[Label]) -> None:
        for label in labels:
            self.lose(label)


def _full(waiting: Mapping[str, Promotion], most: int) -> bool:
    return len(waiting) > most or sum(item.nbytes for item in waiting.values()) > MOST_BYTES


def _popped(waiting: dict[str, W], partition: str | None) -> list[W]:
    gone = [key for key, item in waiting.items() if partition in (None, item.request.partition)]
    return [waiting.pop(key) for key in gone]


class _Unlabelled(Exception):
    """There is no label, for a reason that the outcome has no part in."""


class _Stopped(Exception):
    """The cache was closed while a label was made. The answer counts as wrong: else slow answers would be left out."""


class Settler:
    """Settles what waits in a cache's queue, with an engine that is free.

    clock  seconds that must not jump, for the time that a label takes
    """

    def __init__(
        self,
        engine: Engine,
        cache: "HierarchicalCache",
        run: Run,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._run = run
        self._clock = clock

    def settle_one(self) -> bool:
        """Labels a would-be hit, or else computes an approximately answered prompt. False if none waits."""
        return self.label_one() or self.promote_one()

    def promote_one(self) -> bool:
        """Computes the newest prompt that waits for its promotion, and stores its state. False if none waits.

        Prompts whose exact state has arrived meanwhile, or that another model answered, are passed over. A failure is counted and
        logged, and the prompt forgotten.
        """
        cache = self._cache
        begun = cache.queue.mark()
        while (waiting := cache.queue.take_promotion()) is not None:
            if cache.store.meta(waiting.key) is None and waiting.epoch == self._engine.epoch:
                done, request = False, waiting.request
                try:
                    with keeping(ttl=request.ttl):  # nothing is promoted of a request of which nothing is kept
                        prepared = replace(self._engine.prepare(request), epoch=waiting.epoch)
                        decision, completion = self._exactly(prepared, None)
                        done = cache.keep_exact(decision, completion, begun=begun)
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
        queue = self._cache.queue
        begun = queue.mark()
        label = queue.take_label()
        if label is None:
            return False
        tried: dict[str, float] = {}
        try:
            wrong = self._judged(label, tried, begun)
        except (_Unlabelled, ModelChangedError):
            queue.lose(label)
            return True
        except _Stopped:
            wrong = True
        except Exception as error:  # nobody waits for it: what goes wrong must not reach a request that comes next
            logger.warning("a label failed and counts as wrong: %s: %s", type(error).__name__, error, exc_info=error)
            wrong = True
        except BaseException:  # the process is being ended
            queue.learn(label, True)
            raise
        queue.learn(label, wrong, tried)
        return True

    def _judged(self, label: Label, tried: dict[str, float], begun: int) -> bool:
        """Whether the approximate answer is wrong. `tried` gets what the approximate plan's first token shows;
        `begun`: `queue.mark()` when the hit was taken."""
        trial, cache, queue = label.decision.trial, self._cache, self._cache.queue
        differs, served = queue.differs, label.draw.served
        assert trial is not None
        assert differs is not None
        full = None if served else label.answer
        reused = label.answer if served else _of_donor(trial.plan, label.request, differs)
        at_hand = all(cache.store.meta(donor.id) is not None for donor in trial.plan.donors)
        if label.epoch != self._engine.epoch or (reused is None and not at_hand):
            raise _Unlabelled  # a plan without some of its donors is another plan
        until = self._clock() + SECONDS
        partition = label.request.partition

        def go_on(_token: int, _text: str) -> None:
            if queue.removed_since(begun, partition):
                raise _Unlabelled
            if queue.closed:
                raise _Stopped
            if self._clock() > until:
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
                    cache.keep_exact(decision, completion, begun=begun)
                full = seen(completion)
            if reused is None:
                prefix = label.decision.found.prefix
                engine = self._engine.apart(prefix[0].tokens if prefix is not None else 0)
                plan = replace(trial.plan, accept=look)
                ran = engine.run(prepared, plan, cache.store, on_token=go_on)
                if not isinstance(ran, Completion) or ran.exactly:
                    raise _Unlabelled
                reused = seen(ran)
        go_on(0, "")
        return differs.wrong(label.request, full, reused)

    def _exactly(self, prepared: Prepared, on_token: OnToken | None) -> tuple[Decision, Completion]:
        """Full computation, behind the exact prefix if there is one."""
        decision = self._cache.exactly(prepared, self._engine)
        return decision, self._run(prepared, decision.plans, on_token)[1]


def seen(completion: Completion) -> Seen:
    """An answer as it is compared."""
    return Seen(completion.text, completion.token_ids, completion.continued)


def _of_donor(plan: Plan, request: Request, differs: Differs) -> Seen | None:
    """The answer of an adopted donor, if its greedy one of the wanted length is stored with it: the model would say the same again. Of
    one token the text is left out."""
    if plan.method != "adopt" or differs.logits:
        return None
    donor, tokens = plan.donors[0], differs.tokens or request.sampling.max_new_tokens
    length, first = greedy_answer(donor.metadata)
    if length is None or donor.answer is None:
        return None
    if tokens == 1:
        return Seen("", first)
    return Seen(donor.answer, first) if length == tokens else None
