"""Bounded queue of requests to settle in idle time, and the removals to heed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from dejakv.decide.plan import Decision
from dejakv.request import Request, Sampling
from dejakv.store.budgets import now
from dejakv.store.forks import fork_safe_lock
from dejakv.trust.differs import AnswerComparison, ComparedAnswer
from dejakv.trust.draw import HitDraw
from dejakv.trust.gate import TrustGate

MOST_LABELS, MOST_PROMOTIONS = 256, 64
"""Most would-be hits waiting for a label, and most prompts waiting for exact computation."""

MOST_BYTES = 64 << 20
"""Most bytes of text and pictures waiting, of each kind."""

PREFILL = Sampling(max_new_tokens=1)
"""Sampling of one token, for the state alone."""


@dataclass(frozen=True, kw_only=True)
class PromotionTask:
    """An approximately answered prompt, by its exact key.

    epoch  of the model that answered it
    came   time of the request, in seconds since 1970
    ttl    seconds from then to wait and to use its state, 0 without a limit
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
class LabelTask(PromotionTask):
    """A would-be hit to label by running the other way, by the id of its draw. A *shadow* was answered in full, an *audit* approximately.

    decision  of the request
    answer    given answer, if it is one of the two to compare; None: both must run
    """

    draw: HitDraw
    decision: Decision
    answer: ComparedAnswer | None = None


@dataclass(frozen=True)
class QueueCounts:
    """Waiting labels (None without an error bound) and promotions, and promotions `dropped` for lack of room since the start."""

    labels: int | None = None
    promotions: int = 0
    dropped: int = 0


W = TypeVar("W", bound=PromotionTask)


class SettlingQueue:
    """Bounded queue of labels and promotions, and of the removals that end them. Thread-safe.

    gate, differs  of an error bound, which learns from labels; None: nothing is labelled

    Labels are taken oldest first, since they count in the order of their draws. A full queue loses its oldest shadow, else its oldest
    audit: a lost audit counts as wrong, and later draws alone decide the loss, never its own outcome. An oversized label waits alone.
    Promotions are taken newest first and dropped oldest first; a dropped prompt stays approximate until it comes again.
    """

    def __init__(self, gate: TrustGate | None = None, differs: AnswerComparison | None = None) -> None:
        self.gate = gate
        self.differs = differs
        self.closed = False
        """Whether nothing is to be labelled any more."""
        self._labels: dict[str, LabelTask] = {}
        self._promotions: dict[str, PromotionTask] = {}
        self._dropped = 0
        self._removals: list[str | None] = []
        self._lock = fork_safe_lock()

    def label(self, draw: HitDraw, request: Request, epoch: str, decision: Decision) -> None:
        """Queue a draw's label before its request runs, so that a client leaving at its answer changes nothing."""
        if not draw.labelled:
            return

        label = LabelTask(key=draw.id, request=request, epoch=epoch, came=now(), draw=draw, decision=decision)
        waiting = self._labels
        lost: list[LabelTask] = []
        with self._lock:
            if self.closed:
                lost = [label]
            else:
                waiting[draw.id] = label
                while len(waiting) > 1 and _full(waiting, MOST_LABELS):
                    # A shadow costs time alone; a lost audit counts as wrong.
                    shadows = (id for id, queued in waiting.items() if not queued.draw.served and id != draw.id)
                    lost.append(waiting.pop(next(shadows, next(iter(waiting)))))
        # Outside of the lock: the gate takes its own, and writes to the ledger.
        self._lose(lost)

    def answered(self, draw: HitDraw, answer: ComparedAnswer | None, *, approximate: bool) -> None:
        """Add the answer to a label, None if both answers must run. `approximate`: how it was made; a served plan that ended exactly
        gives no label.
        """
        with self._lock:
            label = self._labels.get(draw.id)
            if label is None:
                return
            if approximate == draw.served:
                self._labels[draw.id] = replace(label, answer=answer)
                return
            # The plan ended exactly after all: there is nothing to compare.
            del self._labels[draw.id]
        self._lose(
            [replace(label, draw=replace(draw, served=False))]
        )  # nothing approximate was served that could be wrong

    def take_label(self) -> LabelTask | None:
        """Remove and return the oldest label, None without. Its taker calls `learn` or `lose`."""
        with self._lock:
            return self._labels.pop(next(iter(self._labels))) if self._labels else None

    def learn(self, label: LabelTask, wrong: bool, tried: Mapping[str, float] | None = None) -> None:
        """Learn the outcome of a taken label. `tried`: features of its plan's run, for a late draw."""
        assert self.gate is not None
        self.gate.learn(label.draw, wrong, tried)

    def lose(self, label: LabelTask) -> None:
        """Give up a taken label, for a reason independent of its outcome: see `TrustGate.lost`."""
        assert self.gate is not None
        self.gate.lost(label.draw)

    def promote(self, decision: Decision) -> None:
        """Queue an approximately answered prompt as the newest, unless its request has `no_store`."""
        if decision.ask.no_store:
            return
        entry, waiting = decision.entry, self._promotions
        request = replace(decision.query.request, sampling=PREFILL, metadata={})
        with self._lock:
            # Removed first, so that it moves to the end, the newest place.
            waiting.pop(entry.id, None)
            waiting[entry.id] = PromotionTask(
                key=entry.id, request=request, epoch=entry.epoch, came=now(), ttl=entry.ttl
            )
            while _full(waiting, MOST_PROMOTIONS):
                del waiting[next(iter(waiting))]
                self._dropped += 1

    def take_promotion(self) -> PromotionTask | None:
        """Remove and return the newest promotion, None without. Its request keeps the rest of its `ttl`."""
        with self._lock:
            while self._promotions:
                _, item = self._promotions.popitem()
                remaining_ttl = item.came + item.ttl - now()
                if not item.ttl:
                    return item
                if remaining_ttl > 0:
                    return replace(item, request=replace(item.request, ttl=remaining_ttl))

            return None

    def removing(self, partition: str | None) -> None:
        """Note the start of a removal, from a partition or from all (None): work begun earlier is not stored."""
        # Only appended to: a mark is a length, and stays true.
        self._removals.append(partition)

    def mark(self) -> int:
        """Current mark for `removed_since`. Take it before the partition of the work is known."""
        return len(self._removals)

    def removed_since(self, mark: int, partition: str) -> bool:
        """Whether a removal that may concern the partition has begun after the mark."""
        return any(removed in (None, partition) for removed in self._removals[mark:])

    def clear(self, partition: str | None) -> None:
        """Forget a partition's requests, None for all; labels are lost."""
        with self._lock:
            lost = _popped(self._labels, partition)
            _popped(self._promotions, partition)
        self._lose(lost)

    def close(self) -> None:
        """Lose all waiting labels, and later ones."""
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

    def _lose(self, labels: Sequence[LabelTask]) -> None:
        for label in labels:
            self.lose(label)


def _full(waiting: Mapping[str, PromotionTask], max_items: int) -> bool:
    return len(waiting) > max_items or sum(item.nbytes for item in waiting.values()) > MOST_BYTES


def _popped(waiting: dict[str, W], partition: str | None) -> list[W]:
    keys = [key for key, item in waiting.items() if partition in (None, item.request.partition)]
    return [waiting.pop(key) for key in keys]
