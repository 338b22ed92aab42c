"""Leaves a failing service alone for a while: nobody waits for it again and again."""

import random
import threading
import time
from collections.abc import Callable

FAILURES = 3
"""In a row, before a service is left alone."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 10.0
"""Seconds; each further failure doubles them. They are drawn at random between half and all, so that machines do not come back at once."""


class Breaker:
    """Says whether a service may be asked: not within a pause after failures, and after it by one caller first. Thread-safe.

    clock  seconds that only grow
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
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
            if self._failures == FAILURES:
                self._since = self._clock()
            self._pause()

    def _pause(self) -> None:
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(10, max(0, self._failures - FAILURES)))
        self._until = self._clock() + random.uniform(0.5, 1) * longest
