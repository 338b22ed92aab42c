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
_TRIP = 1e-3
"""Seconds of a request of which nothing is known: that of a service nearby. Never none, so that each read has a deadline."""
_FORGET_SECONDS = 20.0


class Link:
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
