"""Prompts that were blended, computed exactly when nothing else runs, so that they are exact hits when they come again.

vLLM's engine sleeps while it has no request, and asks its connector first whether there is more to do (`has_pending_push_work`). Once
it has been idle for a while, a waiting prompt is added to the scheduler as a request for one token; it is looked up and stored like
any other, for the time that is left of what its own request allowed. The first request of a client that comes meanwhile ends it, and
the prompt waits again.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dejakv.engines.vllm.settings import Wish
from dejakv.find.promotion import MOST

IDLE_S = 0.5
"""How long nothing must have run: a client that asks again at once is not to wait for a prompt that nobody asked for."""


@dataclass(frozen=True)
class _Prompt:
    """A prompt by its exact key. `until`: when its state may not be used any more, None without a limit."""

    key: str
    request: Any
    until: float | None


@dataclass
class Promoting:
    """Used in the engine loop alone.

    add     gives a prompt to the scheduler once more, as a request of this id
    end     ends such a request
    paused  whether the engine runs nothing for now, or is about to end
    """

    add: Callable[[Any, str], None] = lambda request, request_id: None
    end: Callable[[str], None] = lambda request_id: None
    paused: Callable[[], bool] = lambda: False
    most: int = MOST
    clock: Callable[[], float] = time.monotonic
    _waiting: "OrderedDict[str, _Prompt]" = field(default_factory=lambda: OrderedDict[str, _Prompt]())
    _running: tuple[str, _Prompt] | None = None
    _begun: int = 0
    _idle_since: float | None = None

    @property
    def pending(self) -> bool:
        """Whether the engine is to go on stepping."""
        return bool(self._waiting) and not self.paused()

    def note(self, key: str, request: Any, ttl: float = 0.0) -> None:
        """The prompt of this exact key was answered approximately. The newest goes first, the oldest is dropped first. `ttl`: seconds
        for which it may wait and its state be used, 0 without a limit."""
        self._wait(_Prompt(key, request, self.clock() + ttl if ttl else None))

    def owns(self, request_id: str) -> bool:
        return self._running is not None and self._running[0] == request_id

    @property
    def wish(self) -> Wish:
        """What the prompt that runs asks for: what is allowed to clients does not limit it."""
        until = self._running[1].until if self._running is not None else None
        return Wish("exact", ttl=None if until is None else max(1e-9, until - self.clock()))

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
            _, prompt = self._waiting.popitem()
            if prompt.until is not None and prompt.until <= now:
                return
            self._begun += 1
            self._running = (f"dejakv-promotion-{self._begun}", prompt)
            self.add(prompt.request, self._running[0])

    def ended(self, request_id: str, *, aborted: bool) -> bool:
        """A request is over. True if it was a prompt that was computed again; one that was ended waits again."""
        if self._running is None or self._running[0] != request_id:
            return False
        _, prompt = self._running
        self._running = None
        if aborted:
            self._wait(prompt)
        return not aborted

    def _wait(self, prompt: _Prompt) -> None:
        self._waiting.pop(prompt.key, None)
        self._waiting[prompt.key] = prompt
        while len(self._waiting) > self.most:
            self._waiting.popitem(last=False)
