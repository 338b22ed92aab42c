"""The health of a service behind a network: its latency, and whether it may be asked.

A service that fails is left alone for a while, so that no request waits for it again and again.
"""

import math
import random
import time
from collections.abc import Callable
from statistics import median

from dejakv.store.forks import fork_safe_lock

AT_ONCE = 16
"""Concurrent reads from one service."""
_SEEN = 15
"""Latest reads that count."""
_LARGE = 1 << 18
"""Bytes of a read from which the bandwidth is measured; a smaller read measures the round trip."""
_TRIP = 1e-3
"""Seconds assumed for a request before any was measured: those of a service nearby.

Above 0, so that each read has a deadline.
"""
_FORGET_SECONDS = 20.0
"""Seconds after which measurements are dropped."""
FAILURES = 3
"""Failures in a row before a service is left alone."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 10.0
"""Seconds of a pause after failures.

Each further failure doubles a pause, up to the longest. It is drawn at random between half and all
of these seconds, so that machines do not come back at once.
"""


class LinkTiming:
    """Round trip and seconds a byte of a service, each the median of the latest reads.

    Before the first large read, and after 20 s without one, a byte costs nothing. Without small
    reads, a round trip costs 1 ms. So a service that was slow is tried again.

    Thread-safe without a lock: its lists are replaced, never changed.

    Parameters
    ----------
    clock : Callable[[], float]
        Seconds that only grow.
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
        """Observe a read of `count` objects and `nbytes` bytes that ended, or was given up.

        Parameters
        ----------
        count, nbytes : int
            Objects of the read, and their bytes together.
        seconds : float
            Time of the read.
        """
        rounds = math.ceil(count / AT_ONCE)

        # A large read is more than its round trips: only the rest of its time is the bytes'.
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
    """Whether a service may be asked: not in a pause after failures, and then by one caller first.

    Thread-safe.

    Parameters
    ----------
    clock : Callable[[], float]
        Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = fork_safe_lock()
        self._failures = 0
        self._until = 0.0
        self._since: float | None = None

    def allows(self) -> bool:
        """Return whether to ask the service now.

        Call `worked` or `failed` after each allowed call.
        """
        with self._lock:
            if self._failures < FAILURES:
                return True
            if self._clock() < self._until:
                return False

            # A new pause for all others, until this caller knows more.
            self._pause()
            return True

    @property
    def away_seconds(self) -> float:
        """Seconds since the third failure in a row; 0 if there was none or the service answered."""
        since = self._since
        return 0.0 if since is None else self._clock() - since

    def worked(self) -> None:
        """Note an answer of the service: it may be asked."""
        with self._lock:
            self._failures, self._since = 0, None

    def failed(self) -> None:
        """Note a failure. The third in a row and each later one begin a pause."""
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
