"""The health of a service behind a network: how long its reads take, and whether it may be asked. One that fails is left alone for a while,
so that nobody waits for it again and again."""

import math
import random
import time
from collections.abc import Callable
from statistics import median

from dejakv.store.forks import fork_safe_lock

AT_ONCE = 16
"""Concurrent reads from one service."""
_SEEN = 15
_LARGE = 1 << 18
"""Bytes of a read from which it measures the bandwidth; a smaller one measures the round trip."""
_TRIP = 1e-3
"""Seconds assumed for a request before any was measured: of a service nearby. Above 0, so that each read has a deadline."""
_FORGET_SECONDS = 20.0
FAILURES = 3
"""In a row, before a service is left alone."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 10.0
"""Seconds; each further failure doubles them. They are drawn at random between half and all, so that machines do not come back at once."""


class LinkTiming:
    """Round trip and seconds a byte, each the median of the latest reads. Before the first large read a byte costs nothing, and again
    after 20 s without one, as a round trip costs 1 ms without small ones: a service that was slow is tried again.

    Thread-safe without a lock: its lists are replaced, never changed.

    clock  seconds that only grow
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._trips, self._bytes = list[float](), list[float]()
        self._clock = clock
        self._trip_at = self._bytes_at = clock()

    def seconds(self, count: int, nbytes: int) -> float:
        """Estimate the seconds of a read of so many objects and bytes."""
        now = self._clock()
        if now > self._trip_at + _FORGET_SECONDS:
            self._trips = []
        if now > self._bytes_at + _FORGET_SECONDS:
            self._bytes = []
        # Reads run `AT_ONCE` at a time, so round trips count once for each such group.
        return math.ceil(count / AT_ONCE) * self._trip + nbytes * median(self._bytes or [0.0])

    def read(self, count: int, nbytes: int, seconds: float) -> None:
        """Observe a read, or one given up after `seconds`."""
        rounds = math.ceil(count / AT_ONCE)
        if nbytes < _LARGE:
            self._trips = [*self._trips, seconds / rounds][-_SEEN:]
            self._trip_at = self._clock()
        else:
            self._bytes = [*self._bytes, max(0.0, seconds - rounds * self._trip) / nbytes][-_SEEN:]
            self._bytes_at = self._clock()

    @property
    def _trip(self) -> float:
        return median(self._trips or [_TRIP])


class CircuitBreaker:
    """Says whether a service may be asked: not within a pause after failures, and after it by one caller first. Thread-safe.

    clock  seconds that only grow
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = fork_safe_lock()
        self._failures = 0
        self._until = 0.0
        self._since: float | None = None

    def allows(self) -> bool:
        """Whether to ask the service now. Call `worked` or `failed` after each allowed call."""
        with self._lock:
            if self._failures < FAILURES:
                return True
            if self._clock() < self._until:
                return False
            self._pause()  # until this caller knows more
            return True

    @property
    def away_seconds(self) -> float:
        """For how long the service has failed; 0: it may be asked."""
        since = self._since
        return 0.0 if since is None else self._clock() - since

    def worked(self) -> None:
        with self._lock:
            self._failures, self._since = 0, None

    def failed(self) -> None:
        with self._lock:
            self._failures += 1
            # Only then: a single failure is no outage.
            if self._failures == FAILURES:
                self._since = self._clock()
            self._pause()

    def _pause(self) -> None:
        # The exponent is bounded: the count of failures is not.
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(10, max(0, self._failures - FAILURES)))
        self._until = self._clock() + random.uniform(0.5, 1) * longest
