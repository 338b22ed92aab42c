"""For how long things may be kept of the request that is being served: whatever keeps something beside the stores asks here.

    with keeping(no_store=True):
        ...                          # the request, from its preparation to its answer

Entries of stores are the cache's business. This is about all that would remain beside them: vectors of the latest texts, pixels
of the latest pictures, encoder outputs, readings of texts.
"""

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from dejakv.request import Request

T = TypeVar("T")


@dataclass(frozen=True)
class _Scope:
    """What its request says: nothing is kept of it, or for so many seconds; and what is made for it alone."""

    no_store: bool = False
    ttl: float | None = None
    scratch: dict[Any, Any] = field(default_factory=dict[Any, Any])


_NO_LIMITS = _Scope()
_scope: ContextVar[_Scope] = ContextVar("dejakv_retention", default=_NO_LIMITS)


@runtime_checkable
class Forgets(Protocol):
    """A part that remembers something of partitions' requests for speed."""

    def forget(self, partition: str | None) -> None:
        """Forgets what it remembers of one partition, or of all."""
        ...


def forget(parts: Iterable[object], partition: str | None) -> None:
    """Has those of the parts that remember something forget it."""
    for part in parts:
        if isinstance(part, Forgets):
            part.forget(partition)


def nothing_is_kept() -> bool:
    """Whether the request that this thread or task serves leaves nothing behind."""
    return _scope.get().no_store


def kept_for() -> float | None:
    """Seconds for which what is kept of the request may be used; None: it does not say."""
    return _scope.get().ttl


def for_this_request(key: Any, make: Callable[[], T]) -> T:
    """What is made once for the request and dropped with it. Call it only where `nothing_is_kept`."""
    scope = _scope.get()
    assert scope.no_store
    if key not in scope.scratch:
        scope.scratch[key] = make()
    return scope.scratch[key]


def after_waiting(request: Request, seconds: float) -> Request:
    """The request that has waited for so many seconds: its own time is shorter by them, and nothing is kept once it is over."""
    if request.ttl is None:
        return request
    left = request.ttl - seconds
    return replace(request, ttl=left) if left > 0 else replace(request, ttl=None, no_store=True)


@contextmanager
def keeping(*, no_store: bool = False, ttl: float | None = None) -> Generator[None]:
    """Inside, nothing is kept if `no_store`, and no longer than `ttl` seconds where that is given."""
    token = _scope.set(_Scope(no_store, ttl))
    try:
        yield
    finally:
        _scope.reset(token)


def asks_no_store(values: Iterable[str]) -> bool:
    """Whether one of the values of a `Cache-Control` header (RFC 9111, 5.2.1) has the directive `no-store`."""
    directives = ",".join(values).split(",")
    return any(directive.strip().lower() == "no-store" for directive in directives)


class Removals:
    """The last purge or clearing of each partition: work that began before it is not stored. Thread-safe."""

    def __init__(self) -> None:
        self._number = 0
        self._last: dict[str | None, int] = {}
        self._lock = threading.Lock()

    def note(self, partition: str | None) -> None:
        """One begins, of a partition or of all."""
        with self._lock:
            self._number += 1
            self._last[partition] = self._number

    def mark(self) -> int:
        """Now, for `since`. Taken before it is known of which partition the work will be."""
        return self._number

    def since(self, mark: int, partition: str) -> bool:
        """Whether one that may concern the partition has begun after the mark."""
        with self._lock:
            return max(self._last.get(partition, 0), self._last.get(None, 0)) > mark
