"""Prompts that were blended, computed exactly when nothing else runs, so that they are exact hits when they come again.

vLLM's engine sleeps while it has no request, and asks its connector first whether there is more to do (`has_pending_push_work`). Once
it has been idle for a while, a waiting prompt is added to the scheduler as a request for one token; it is looked up and stored like
any other. The first request of a client that comes meanwhile ends it, and the prompt waits again.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dejakv.find.promotion import MOST

IDLE_S = 0.5
"""How long nothing must have run: a client that asks again at once is not to wait for a prompt that nobody asked for."""


@dataclass
class Promoting:
    """Used in the engine loop alone.

    add     gives a prompt to the scheduler once more, as a request of this id
    end     ends such a request
    paused  whether the scheduler runs nothing for now
    """

    add: Callable[[Any, str], None] = lambda request, request_id: None
    end: Callable[[str], None] = lambda request_id: None
    paused: Callable[[], bool] = lambda: False
    most: int = MOST
    clock: Callable[[], float] = time.monotonic
    _waiting: "OrderedDict[str, Any]" = field(default_factory=lambda: OrderedDict[str, Any]())
    _running: tuple[str, str, Any] | None = None
    _begun: int = 0
    _idle_since: float | None = None

    @property
    def pending(self) -> bool:
        """Whether the engine is to go on stepping."""
        return bool(self._waiting) and not self.paused()

    def note(self, key: str, request: Any) -> None:
        """The prompt of this exact key was answered approximately. The newest goes first, the oldest is dropped first."""
        self._waiting.pop(key, None)
        self._waiting[key] = request
        while len(self._waiting) > self.most:
            self._waiting.popitem(last=False)

    def owns(self, request_id: str) -> bool:
        return self._running is not None and self._running[0] == request_id

    def came(self) -> None:
        """A client's request has come: it goes first."""
        self._idle_since = None
        if self._running is not None:
            self.end(self._running[0])

    def step(self, *, idle: bool) -> None:
        """A step is planned; `idle`: for nobody."""
        if not idle or not self.pending:
            self._idle_since = None
            return
        now = self.clock()
        self._idle_since = now if self._idle_since is None else self._idle_since
        if self._running is None and now - self._idle_since >= IDLE_S:
            key, request = self._waiting.popitem()
            self._begun += 1
            self._running = (f"dejakv-promotion-{self._begun}", key, request)
            self.add(request, self._running[0])

    def ended(self, request_id: str, *, aborted: bool) -> bool:
        """A request is over. True if it was a prompt that was computed again; one that was ended waits again."""
        if self._running is None or self._running[0] != request_id:
            return False
        _, key, request = self._running
        self._running = None
        if aborted:
            self.note(key, request)
        return not aborted
