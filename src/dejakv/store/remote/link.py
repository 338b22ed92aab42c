"""Seconds that reads from a service take, measured by the reads themselves."""

import math
import time
from collections.abc import Callable
from statistics import median

AT_ONCE = 16
"""Objects of one service that are read at the same time."""
_SEEN = 15
_LARGE = 1 << 18
"""Bytes from which a read tells the bandwidth; a smaller one tells the round trip."""
_FORGET_SECONDS = 20.0


class Link:
    """Round trip and seconds a byte, each the median of the latest reads. Before the first large read a byte costs nothing, and again
    after 20 s without one; a round trip costs nothing after 20 s without a small one: a service that was slow, or that answered the first
    request slowly, is tried again.

    Thread-safe without a lock: its lists are replaced, never changed.

    trip   seconds of a request at the start
    clock  seconds that only grow
    """

    def __init__(self, trip: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._trips, self._bytes = [trip], list[float]()
        self._clock = clock
        self._trip_at = self._bytes_at = clock()

    def seconds(self, count: int, nbytes: int) -> float:
        """Estimate of a read of so many objects and bytes."""
        now = self._clock()
        if now > self._trip_at + _FORGET_SECONDS:
            self._trips = []
        if now > self._bytes_at + _FORGET_SECONDS:
            self._bytes = []
        return math.ceil(count / AT_ONCE) * median(self._trips or [0.0]) + nbytes * median(self._bytes or [0.0])

    def read(self, count: int, nbytes: int, seconds: float) -> None:
        """Observe a read, or one that was given up after `seconds`."""
        rounds = math.ceil(count / AT_ONCE)
        if nbytes < _LARGE:
            self._trips = [*self._trips, seconds / rounds][-_SEEN:]
            self._trip_at = self._clock()
        else:
            left = max(0.0, seconds - rounds * median(self._trips or [0.0]))
            self._bytes = [*self._bytes, left / nbytes][-_SEEN:]
            self._bytes_at = self._clock()
