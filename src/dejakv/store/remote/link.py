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
_FORGET_SECONDS = 60.0


class Link:
    """Round trip and seconds a byte, each the median of the latest reads. Before the first large read a byte costs nothing, and again
    after a minute without one: a service that was slow is tried again.

    Thread-safe without a lock: its lists are replaced, never changed.

    trip   seconds of a request at the start
    clock  seconds that only grow
    """

    def __init__(self, trip: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._trips, self._bytes = [trip], list[float]()
        self._clock = clock
        self._last = clock()

    def seconds(self, count: int, nbytes: int) -> float:
        """Estimate of a read of so many objects and bytes."""
        if self._clock() > self._last + _FORGET_SECONDS:
            self._bytes = []
        return math.ceil(count / AT_ONCE) * median(self._trips) + nbytes * median(self._bytes or [0.0])

    def read(self, count: int, nbytes: int, seconds: float) -> None:
        """Observe a read, or one that was given up after `seconds`."""
        rounds = math.ceil(count / AT_ONCE)
        if nbytes < _LARGE:
            self._trips = [*self._trips, seconds / rounds][-_SEEN:]
        else:
            left = max(0.0, seconds - rounds * median(self._trips))
            self._bytes = [*self._bytes, left / nbytes][-_SEEN:]
            self._last = self._clock()
