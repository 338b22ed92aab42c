"""A circuit breaker: a server that is down costs a few time-outs, then nothing."""

import threading
import time
from collections.abc import Callable


class Breaker:
    """After `failures` in a row, `allow` is False for `cooldown` seconds; then one caller may try. Each further failure
    doubles the wait, up to `longest` seconds; a success ends it. Thread-safe. `clock` gives seconds that only grow."""

    def __init__(
        self,
        failures: int = 2,
        cooldown: float = 1.0,
        longest: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = failures
        self._first_wait = cooldown
        self._longest = longest
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._wait = cooldown
        self._closed_until = 0.0

    def allow(self) -> bool:
        """Whether to try. After a wait only one caller gets True; the others continue to wait."""
        with self._lock:
            if self._failures < self._limit:
                return True
            now = self._clock()
            if now < self._closed_until:
                return False
            self._closed_until = now + self._wait
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._failures, self._wait = 0, self._first_wait

    def failed(self) -> None:
        with self._lock:
            self._failures += 1
            if self._failures >= self._limit:
                self._closed_until = self._clock() + self._wait
                self._wait = min(self._longest, 2 * self._wait)
