"""Bounded queue of requests to settle in idle time, and the removals that end them."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

from dejakv.decide.plan import Decision
from dejakv.request import Request, Sampling
from dejakv.store.budgets import now
from dejakv.store.forks import fork_safe_lock
from dejakv.trust.differs import AnswerComparison, ComparedAnswer
from dejakv.trust.draw import HitDraw
from dejakv.trust.gate import TrustGate

MAX_LABELS, MAX_PROMOTIONS = 256, 64
"""Maximum would-be hits that wait for a label, and prompts that wait for exact computation."""

MAX_WAITING_BYTES = 64 << 20
"""Maximum bytes (characters of text and bytes of media) that wait, of labels and of promotions."""

MAX_REMOVALS = 1000
"""Removals that are remembered. Work that began before the oldest of them is not stored."""

PREFILL = Sampling(max_new_tokens=1)
"""Sampling of one token, for the state alone."""


@dataclass(frozen=True, kw_only=True)
class PromotionTask:
    """A prompt that was answered approximately, or an answer that left no exact state.

    Attributes
    ----------
    key : str
        Exact key of the prompt.
    request : Request
        The request to compute.
    epoch : str
        Epoch of the model that answered it.
    came : float
        Time of the request, in seconds since 1970.
    ttl : float
        Seconds from then to wait and to use its state; 0 without a limit.
    answer_ids : tuple[int, ...]
        Tokens of the answer, to be computed behind the prompt; empty for the prompt alone.
    answer_text : str
        Text of these tokens.
    """

    key: str
    request: Request
    epoch: str
    came: float
    ttl: float = 0.0
    answer_ids: tuple[int, ...] = ()
    answer_text: str = ""

    @property
    def nbytes(self) -> int:
        """Characters of text and bytes of media that wait with the task."""
        request = self.request
        return (
            len(request.prompt)
            + len(request.chunk)
            + len(self.answer_text)
            + sum(len(item.data) for item in request.media)
        )


@dataclass(frozen=True, kw_only=True)
class LabelTask(PromotionTask):
    """A would-be hit to label by running the other way. Its `key` is the id of its draw.

    A *shadow* was answered in full, an *audit* approximately.

    Attributes
    ----------
    draw : HitDraw
        Draw that asked for the label.
    decision : Decision
        Decision on the request.
    answer : ComparedAnswer, optional
        Answer of the request, if it is one of the two to compare. With None both must run.
    """

    draw: HitDraw
    decision: Decision
    answer: ComparedAnswer | None = None


@dataclass(frozen=True)
class QueueCounts:
    """Numbers of waiting tasks.

    Attributes
    ----------
    labels : int, optional
        Waiting labels. None without an error bound.
    promotions : int
        Waiting promotions.
    dropped : int
        Promotions dropped for lack of room since the start.
    """

    labels: int | None = None
    promotions: int = 0
    dropped: int = 0


W = TypeVar("W", bound=PromotionTask)


class SettlingQueue:
    """Bounded queue of labels and promotions, and of the removals that end them. Thread-safe.

    Labels are taken oldest first, since they count in the order of their draws. A full queue loses
    its oldest shadow, else its oldest audit: a lost audit counts as wrong, and later draws alone
    decide the loss, never its own outcome. An oversized label waits alone.

    Promotions are taken newest first and dropped oldest first. A dropped prompt stays approximate
    until it comes again.

    Parameters
    ----------
    gate : TrustGate, optional
        Gate of an error bound, which learns from labels. With None nothing is labelled.
    differs : AnswerComparison, optional
        Definition of a wrong answer.
    """

    def __init__(
        self, gate: TrustGate | None = None, differs: AnswerComparison | None = None
    ) -> None:
        self.gate = gate
        self.differs = differs
        self.closed = False
        """Whether nothing is to be labelled any more."""
        self._labels: dict[str, LabelTask] = {}
        self._promotions: dict[str, PromotionTask] = {}
        self._dropped = 0
        self._removals: deque[str | None] = deque(maxlen=MAX_REMOVALS)
        self._removal_count = 0
        self._lock = fork_safe_lock()

    def label(self, draw: HitDraw, request: Request, epoch: str, decision: Decision) -> None:
        """Queue a draw's label before its request runs; a draw without a label is ignored.

        A client that leaves at its answer then changes nothing.
        """
        if not draw.labelled:
            return

        label = LabelTask(
            key=draw.id, request=request, epoch=epoch, came=now(), draw=draw, decision=decision
        )
        waiting = self._labels
        lost: list[LabelTask] = []
        with self._lock:
            if self.closed:
                lost = [label]
            else:
                waiting[draw.id] = label
                while len(waiting) > 1 and _full(waiting, MAX_LABELS):
                    # A shadow costs time alone; a lost audit counts as wrong.
                    shadows = (
                        id
                        for id, queued in waiting.items()
                        if not queued.draw.served and id != draw.id
                    )
                    lost.append(waiting.pop(next(shadows, next(iter(waiting)))))
        # Outside of the lock: the gate takes its own, and writes to the ledger.
        self._lose(lost)

    def add_answer(
        self, draw: HitDraw, answer: ComparedAnswer | None, *, approximate: bool
    ) -> None:
        """Add the answer to a label.

        A served plan that ended exactly gives no label.

        Parameters
        ----------
        answer : ComparedAnswer, optional
            Answer to compare. With None both answers must run.
        approximate : bool
            Whether the answer was computed approximately.
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
        # Nothing approximate was served that could be wrong.
        self._lose([replace(label, draw=replace(draw, served=False))])

    def take_label(self) -> LabelTask | None:
        """Remove and return the oldest label; None if no label waits.

        Its taker calls `learn` or `lose`.
        """
        with self._lock:
            return self._labels.pop(next(iter(self._labels))) if self._labels else None

    def learn(
        self, label: LabelTask, wrong: bool, tried: Mapping[str, float] | None = None
    ) -> None:
        """Report the outcome of a taken label to the gate.

        Parameters
        ----------
        tried : Mapping[str, float], optional
            Features of its plan's run, for a late draw.
        """
        assert self.gate is not None
        self.gate.learn(label.draw, wrong, tried)

    def lose(self, label: LabelTask) -> None:
        """Give up a taken label for a reason independent of its outcome (see `TrustGate.lost`)."""
        assert self.gate is not None
        self.gate.lost(label.draw)

    def promote(
        self, decision: Decision, answer_ids: tuple[int, ...] = (), answer_text: str = ""
    ) -> None:
        """Queue a prompt and its answer as the newest; with `no_store` nothing is queued.

        Parameters
        ----------
        decision : Decision
            Decision on the prompt.
        answer_ids : tuple[int, ...]
            Tokens of the answer to settle behind the prompt; empty for the prompt alone.
        answer_text : str
            Text of these tokens.
        """
        if decision.ask.no_store:
            return

        entry, waiting = decision.entry, self._promotions

        request = replace(decision.query.request, sampling=PREFILL, metadata={})
        with self._lock:
            # Removed first, so that it moves to the end, the newest place.
            waiting.pop(entry.id, None)
            waiting[entry.id] = PromotionTask(
                key=entry.id,
                request=request,
                epoch=entry.epoch,
                came=now(),
                ttl=entry.ttl,
                answer_ids=answer_ids,
                answer_text=answer_text,
            )
            while _full(waiting, MAX_PROMOTIONS):
                del waiting[next(iter(waiting))]
                self._dropped += 1

    def take_promotion(self) -> PromotionTask | None:
        """Remove and return the newest promotion; None if none waits.

        Its request gets the rest of its `ttl`. Expired promotions are dropped.
        """
        with self._lock:
            while self._promotions:
                _, item = self._promotions.popitem()

                remaining_ttl = item.came + item.ttl - now()
                if not item.ttl:
                    return item
                if remaining_ttl > 0:
                    return replace(item, request=replace(item.request, ttl=remaining_ttl))

            return None

    def begin_removal(self, partition: str | None) -> None:
        """Note the start of a removal from a partition, or from all with None.

        Work that began earlier is then not stored.
        """
        with self._lock:
            self._removals.append(partition)
            self._removal_count += 1

    def mark(self) -> int:
        """Return the number of removals begun so far, for `removed_since`.

        Take it before the work leaves the queue: every later removal is then noticed.
        """
        with self._lock:
            return self._removal_count

    def removed_since(self, mark: int, partition: str) -> bool:
        """Return whether a removal that may concern the partition has begun after the mark."""
        with self._lock:
            later_count = self._removal_count - mark
            # Of those that are forgotten nobody knows whether they concerned the partition.
            if later_count > len(self._removals):
                return True

            later = islice(reversed(self._removals), later_count)
            return any(removed in (None, partition) for removed in later)

    def clear(self, partition: str | None) -> None:
        """Forget a partition's requests, None for all; labels are lost."""
        with self._lock:
            lost = _pop_partition(self._labels, partition)
            _pop_partition(self._promotions, partition)
        self._lose(lost)

    def close(self) -> None:
        """Lose all waiting labels, and later ones."""
        with self._lock:
            self.closed = True
            lost = _pop_partition(self._labels, None)
        self._lose(lost)

    @property
    def counts(self) -> QueueCounts:
        """Numbers of waiting tasks, read under the lock."""
        with self._lock:
            labels = len(self._labels) if self.gate is not None else None
            return QueueCounts(labels, len(self._promotions), self._dropped)

    def __len__(self) -> int:
        return len(self._labels) + len(self._promotions)

    def _lose(self, labels: Sequence[LabelTask]) -> None:
        for label in labels:
            self.lose(label)


def _full(waiting: Mapping[str, PromotionTask], max_items: int) -> bool:
    return (
        len(waiting) > max_items
        or sum(item.nbytes for item in waiting.values()) > MAX_WAITING_BYTES
    )


def _pop_partition(waiting: dict[str, W], partition: str | None) -> list[W]:
    keys = [key for key, item in waiting.items() if partition in (None, item.request.partition)]
    return [waiting.pop(key) for key in keys]
