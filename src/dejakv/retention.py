"""Requests of which nothing is kept (`no_store`): whatever remembers something for speed asks here first.

    with keeping(no_store=True):
        ...                          # the request, from its preparation to its answer

Entries of stores are the cache's business. This is about all that would remain beside them: vectors of the latest texts, pixels
of the latest pictures, encoder outputs, readings of texts.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")
_scratch: ContextVar[dict[Any, Any] | None] = ContextVar("dejakv_scratch", default=None)


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
    return _scratch.get() is not None


def for_this_request(key: Any, make: Callable[[], T]) -> T:
    """What is made once for the request and dropped with it. Call it only where `nothing_is_kept`."""
    scratch = _scratch.get()
    assert scratch is not None
    if key not in scratch:
        scratch[key] = make()
    return scratch[key]


@contextmanager
def keeping(*, no_store: bool) -> Generator[None]:
    """Inside, nothing is kept if `no_store`."""
    token = _scratch.set({} if no_store else None)
    try:
        yield
    finally:
        _scratch.reset(token)
