"""Which prompts are stored: long enough, seen before, and within the disk's bytes a second."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from cachetools import FIFOCache

from dejakv.errors import ConfigError

Clock = Callable[[], float]


@dataclass(frozen=True)
class Admission:
    """Admission rules of a store; zeros and False admit everything.

    min_tokens      shorter prompts are refused (`too_short`)
    second_sight    a prompt is refused the first time (`first_sight`): most never repeat
    max_write_rate  bytes a second; more is refused (`rate`). The first chunk over the limit still passes and is paid off
                    before the next, so that a chunk larger than one second's bytes can be stored at all
    remembered      number of ids that second sight remembers, the latest ones
    """

    min_tokens: int = 0
    second_sight: bool = False
    max_write_rate: int = 0
    remembered: int = 65_536

    def __post_init__(self) -> None:
        for name in ("min_tokens", "max_write_rate"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative: give a limit, or 0 for none")
        if self.remembered < 1:
            raise ConfigError(f"remembered={self.remembered}: second sight must remember at least 1 id")


class AdmissionGate:
    """Applies an `Admission`. Thread-safe. `clock` gives seconds that only grow."""

    def __init__(self, rules: Admission, clock: Clock = time.monotonic) -> None:
        self._rules = rules
        self._clock = clock
        self._seen: FIFOCache[str, None] = FIFOCache(rules.remembered)
        self._allowance = float(rules.max_write_rate)
        self._filled = clock()
        self._lock = threading.Lock()

    def unwanted(self, id: str, tokens: int) -> str | None:
        """The reason not to capture a prompt, or None. Counts as a sight of it."""
        if tokens < self._rules.min_tokens:
            return "too_short"
        if self._rules.second_sight:
            with self._lock:
                known = id in self._seen
                self._seen[id] = None
            if not known:
                return "first_sight"
        return None

    def overrate(self, nbytes: int, *, refuse: bool = True) -> str | None:
        """`rate` if the bytes of the last second have used up the limit; otherwise, or if they come all the same, books the bytes and
        returns None."""
        rate = self._rules.max_write_rate
        if not rate:
            return None
        with self._lock:
            now = self._clock()
            self._allowance = min(float(rate), self._allowance + rate * (now - self._filled))
            self._filled = now
            if refuse and self._allowance <= 0:
                return "rate"
            self._allowance -= nbytes
        return None
