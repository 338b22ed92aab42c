"""How old an entry is, by clocks that may jump. Where that is not known it is too old: state leaves early rather than late."""

import threading
import time
from collections.abc import Callable

from dejakv.store.base import ChunkMeta

Clock = Callable[[], float]

SKEW = 5.0
"""Seconds by which a clock may be set back. What was made later than that from now was made by another
clock, or this one was set back since."""


def is_older(created: float, seconds: float, now: float) -> bool:
    """Whether what was made at `created` is `seconds` old, or of an unknown age because it is from the future."""
    return not -SKEW <= now - created < seconds


def is_expired(meta: ChunkMeta, now: float) -> bool:
    return meta.ttl > 0 and is_older(meta.created, meta.ttl, now)


def remaining(meta: ChunkMeta, now: float) -> float:
    """Seconds that an entry has left, 0 for one without a limit; never less than a tiny time for one with a limit."""
    return max(1e-9, meta.created + meta.ttl - now) if meta.ttl else 0.0


def shortest(*lifetimes: float | None) -> float:
    """The shortest of several limits in seconds; 0 and None are no limits."""
    return min((one for one in lifetimes if one), default=0.0)


class SteadyClock:
    """Seconds since 1970 that never go back while the process lives. Thread-safe.

    A clock that is set forward is followed. One that is set back is not: the seconds go on from where they were, so that
    nothing becomes younger.
    """

    def __init__(self, wall: Clock = time.time, elapsed: Clock = time.monotonic) -> None:
        self._wall = wall
        self._elapsed = elapsed
        self._lock = threading.Lock()
        self._last = wall()
        self._at = elapsed()

    def __call__(self) -> float:
        with self._lock:
            at = self._elapsed()
            self._last = max(self._wall(), self._last + at - self._at)
            self._at = at
            return self._last


now = SteadyClock()
"""This process's clock."""
