"""Would-be hits that wait for their label, in bounds: the way that was not taken is to run when nothing else does.

A *shadow* was answered in full, and its approximate plan is to run; an *audit* was answered approximately, and full computation is to run.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from dejakv.request import Request
from dejakv.store.age import now
from dejakv.trust.differs import Differs, Seen
from dejakv.trust.draw import Draw
from dejakv.trust.gate import Gate

MOST = 256
"""Would-be hits that wait at once."""

MOST_BYTES = 64 << 20
"""Bytes of text and pictures of waiting requests. A request that alone has more waits alone."""

SECONDS = 600.0
"""For which the runs of one label may take, together. It counts as wrong then: else slow requests would be left out."""

D = TypeVar("D")


@dataclass(frozen=True)
class Audit(Generic[D]):
    """One would-be hit.

    decision  how it was to be run
    epoch     of the model that it was decided for
    answer    what was answered, if that is one of the two answers to be compared; None: both must run
    came      seconds since 1970 in which it was asked
    """

    draw: Draw
    request: Request
    epoch: str
    decision: D
    answer: Seen | None = None
    came: float = 0.0

    @property
    def nbytes(self) -> int:
        request = self.request
        return len(request.prompt) + len(request.chunk) + sum(len(item.data) for item in request.media)


class Audits(Generic[D]):
    """The hits of one gate that wait. Thread-safe.

    The oldest is labelled first, since labels count in the order of their draws. If there is no room the oldest is lost, a shadow
    before any audit, since an audit that is lost counts as wrong: it stays or goes by what comes after it, and not by its own outcome.
    """

    def __init__(self, gate: Gate, differs: Differs, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self.gate = gate
        self.differs = differs
        self.on_label: Callable[[str, bool, Seen | None], None] = lambda _id, _wrong, _reused: None
        """Told of each label: the id of its draw, whether the answer was wrong, and the approximate answer if it is known."""
        self._most = most
        self._most_bytes = most_bytes
        self._waiting: OrderedDict[str, Audit[D]] = OrderedDict()
        self._nbytes = 0
        self._closed = False
        self._lock = threading.Lock()

    def note(self, draw: Draw, request: Request, epoch: str, decision: D) -> None:
        """A labelled draw waits from before its request runs: a client who leaves when it sees the answer changes nothing."""
        if not draw.labelled:
            return
        audit = Audit(draw, request, epoch, decision, came=now())
        with self._lock:
            self._waiting[draw.id] = audit
            self._nbytes += audit.nbytes
            dropped = [audit] if self._closed else []
            while len(self._waiting) > 1 and (len(self._waiting) > self._most or self._nbytes > self._most_bytes):
                shadows = (id for id, waiting in self._waiting.items() if not waiting.draw.served and id != draw.id)
                dropped.append(self._remove(next(shadows, next(iter(self._waiting)))))
            if self._closed:
                self._remove(draw.id)
        self._lose(dropped)

    def answered(self, draw: Draw, answer: Seen | None, *, approximate: bool) -> None:
        """What the request was answered, None where both answers must run; `approximate`: whether that was approximately. A plan to
        reuse that ended in an exact answer is no approximate answer, and nothing that is labelled."""
        with self._lock:
            audit = self._waiting.get(draw.id)
            if audit is None:
                return
            if approximate == draw.served:
                self._waiting[draw.id] = replace(audit, answer=answer)
                return
            self._remove(draw.id)
        self.gate.lost(replace(draw, served=False))  # nothing approximate was served that could be wrong

    def take(self) -> Audit[D] | None:
        """The oldest, which waits no longer; None if there is none. Its taker calls `learn` or `lose`."""
        with self._lock:
            return self._remove(next(iter(self._waiting))) if self._waiting else None

    def learn(
        self, audit: Audit[D], wrong: bool, tried: Mapping[str, float] | None = None, reused: Seen | None = None
    ) -> None:
        """The label of one that was taken. `tried`: what running its plan showed, for a late draw; `reused`: see `on_label`."""
        self.gate.learn(audit.draw, wrong, tried)
        self.on_label(audit.draw.id, wrong, reused)

    def lose(self, audit: Audit[D]) -> None:
        """One that was taken cannot be labelled, for a reason that its outcome has no part in: see `Gate.lost`."""
        self.gate.lost(audit.draw)

    def clear(self, partition: str | None) -> None:
        """Forgets one partition's requests, None for all: they are lost."""
        with self._lock:
            dropped = [
                self._remove(id)
                for id, audit in list(self._waiting.items())
                if partition in (None, audit.request.partition)
            ]
        self._lose(dropped)

    def close(self) -> None:
        """Whatever waits is lost, and what comes later."""
        with self._lock:
            self._closed = True
            dropped = [self._remove(id) for id in list(self._waiting)]
        self._lose(dropped)

    @property
    def closed(self) -> bool:
        """Whether nothing is to be labelled any more."""
        return self._closed

    def __len__(self) -> int:
        return len(self._waiting)

    def _remove(self, id: str) -> Audit[D]:
        audit = self._waiting.pop(id)
        self._nbytes -= audit.nbytes
        return audit

    def _lose(self, dropped: list[Audit[D]]) -> None:
        for audit in dropped:
            self.lose(audit)
