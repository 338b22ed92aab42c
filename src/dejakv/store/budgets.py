"""Rules of a store: what is worth storing, the part of each partition in its budgets, and how long an entry may be used."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cachetools import FIFOCache

from dejakv.errors import ConfigError
from dejakv.store.base import ChunkMeta
from dejakv.store.forks import fork_safe_lock

Clock = Callable[[], float]
PolicyName = Literal["lru", "lfu"]
POLICIES: dict[str, str] = {"lru": "used", "lfu": "hits, used"}
"""Order of eviction: least recently used; or least often, then least recently used."""


_REMEMBERED = 65_536
"""The latest ids, remembered for second sight."""


class NoRoom(Exception):
    """The entry does not fit the budget, whatever leaves."""


@dataclass(frozen=True)
class Admission:
    """Admission rules of a store; zeros and False admit everything.

    min_tokens      shorter prompts are refused (`too_short`)
    second_sight    a prompt is refused the first time (`first_sight`): most never repeat
    max_write_rate  bytes a second; more is refused (`rate`). The first chunk over the limit still passes and is paid off
                    before the next, so that a chunk larger than one second's bytes can be stored at all
    """

    min_tokens: int = 0
    second_sight: bool = False
    max_write_rate: int = 0

    def __post_init__(self) -> None:
        for name in ("min_tokens", "max_write_rate"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative: give a limit, or 0 for none")


class AdmissionGate:
    """Applies an `Admission`. Not thread-safe: the store's lock protects it. `clock` gives seconds that only grow."""

    def __init__(self, rules: Admission, clock: Clock = time.monotonic) -> None:
        self._rules = rules
        self._clock = clock
        self._seen: FIFOCache[str, None] = FIFOCache(_REMEMBERED)
        self._allowance = float(rules.max_write_rate)
        self._filled = clock()

    def unwanted(self, id: str, tokens: int) -> str | None:
        """The reason not to capture a prompt, or None. Counts as a sight of it."""
        if tokens < self._rules.min_tokens:
            return "too_short"
        if self._rules.second_sight:
            seen_before = id in self._seen
            self._seen[id] = None
            if not seen_before:
                return "first_sight"
        return None

    def overrate(self, nbytes: int, *, refuse: bool = True) -> str | None:
        """`rate` if the bytes of the last second have used up the limit; otherwise, or if they come all the same, books the bytes and
        returns None."""
        rate = self._rules.max_write_rate
        if not rate:
            return None
        now = self._clock()
        # A token bucket of one second: idle time earns no more than that.
        self._allowance = min(float(rate), self._allowance + rate * (now - self._filled))
        self._filled = now

        if refuse and self._allowance <= 0:
            return "rate"
        # May fall below 0: what is over the limit delays the next one.
        self._allowance -= nbytes
        return None


@dataclass(frozen=True)
class PartitionBudget:
    """Budget of one partition; 0 bytes or entries: no limit of its own."""

    max_bytes: int = 0
    max_entries: int = 0


@dataclass(frozen=True)
class PartitionBudgets:
    """The parts of a budget of `max_bytes` and `max_entries` (0: none) among `partitions` partitions, the named ones included.

    named  parts of partitions by name; one without entries shares those that are left with the others

    Raises: ConfigError if a partition would have no part.
    """

    partitions: int = 1
    max_bytes: int = 0
    max_entries: int = 0
    named: Mapping[str, PartitionBudget] = field(default_factory=dict[str, PartitionBudget])

    def __post_init__(self) -> None:
        if len(self.named) > self.partitions:
            raise ConfigError(
                f"{len(self.named)} partitions have a quota of their own, and partitions={self.partitions}: count them too"
            )

        for resource, budget, quotas in (
            ("bytes", self.max_bytes, [part.max_bytes for part in self.named.values()]),
            ("entries", self.max_entries, [part.max_entries for part in self.named.values()]),
        ):
            # Each partition without a quota must get at least one byte or entry.
            unnamed_count = self.partitions - sum(quota > 0 for quota in quotas)
            if budget and budget - sum(quotas) < unnamed_count:
                raise ConfigError(
                    f"a budget of {budget} {resource} has no part for each of {self.partitions} partitions, of which some have "
                    f"{sum(quotas)} by name: raise it, lower their quotas, or give 0 for no limit"
                )

    @property
    def divided(self) -> bool:
        """Whether partitions have limits of their own."""
        return self.partitions > 1 or bool(self.named)

    def of(self, partition: str) -> PartitionBudget:
        """The part of a partition. All without a name have equal parts."""
        named_budget = self.named.get(partition, PartitionBudget())
        # A quota of 0 is none: such a partition shares what the named ones leave.
        nbytes = named_budget.max_bytes or self._equal(self.max_bytes, [part.max_bytes for part in self.named.values()])
        entries = named_budget.max_entries or self._equal(
            self.max_entries, [part.max_entries for part in self.named.values()]
        )
        return PartitionBudget(nbytes, entries)

    def scaled(self, max_bytes: int, max_entries: int = 0) -> "PartitionBudgets":
        """The same proportions of another budget in bytes, in equal parts where this one has no limit; entries in equal parts."""
        shares = {
            name: PartitionBudget(max(1, part.max_bytes * max_bytes // self.max_bytes))
            for name, part in self.named.items()
            if part.max_bytes and self.max_bytes and max_bytes
        }
        return PartitionBudgets(self.partitions, max_bytes, max_entries, shares)

    def _equal(self, budget: int, quotas: Sequence[int]) -> int:
        unnamed_count = self.partitions - sum(quota > 0 for quota in quotas)
        return (budget - sum(quotas)) // unnamed_count if budget and unnamed_count else 0


@dataclass(frozen=True)
class Budget:
    """Limits of a store; 0: no limit.

    parts   of partitions; each evicts its own entries alone
    policy  which entries leave first: `lru` or `lfu`

    Raises: ConfigError for a negative limit or an unknown policy.
    """

    max_bytes: int = 0
    max_entries: int = 0
    policy: PolicyName = "lru"
    parts: PartitionBudgets = field(default_factory=PartitionBudgets)

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_entries"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative: give a limit, or 0 for none")
        if self.policy not in POLICIES:
            raise ConfigError(f"eviction policy {self.policy!r} is unknown: choose one of {', '.join(POLICIES)}")

    def limits(self, partition: str) -> list[tuple[str | None, int, int]]:
        """Partition (None: all), bytes and entries of each limit for entries of this partition."""
        partition_budget = self.parts.of(partition)
        partition_limits: list[tuple[str | None, int, int]] = []
        if self.parts.divided:
            partition_limits = [(partition, partition_budget.max_bytes, partition_budget.max_entries)]
        return [*partition_limits, (None, self.max_bytes, self.max_entries)]


def named_parts(quotas: Sequence[str]) -> dict[str, PartitionBudget]:
    """Parse quotas `NAME=BYTES` or `NAME=BYTES:ENTRIES` by partition. Raises: ConfigError for another text or a name given twice."""
    budgets: dict[str, PartitionBudget] = {}
    for text in quotas:
        # The last `=`: a partition's name may hold one.
        name, separator, sizes = text.rpartition("=")
        numbers = sizes.split(":")
        if not separator or len(numbers) > 2 or not all(number.isascii() and number.isdigit() for number in numbers):
            raise ConfigError(f"quotas: {text[:80]!r} is none: give NAME=BYTES or NAME=BYTES:ENTRIES")
        if name in budgets:
            raise ConfigError(f"the partition {name[:80]!r} has two quotas: give one")
        budgets[name] = PartitionBudget(*map(int, numbers))

    return budgets


SKEW = 5.0
"""Seconds by which a clock may be set back. Anything made later than now + SKEW was made by another clock, or before a larger step
back."""


def is_older(created: float, seconds: float, now: float) -> bool:
    """Whether an entry made at `created` is `seconds` old, or from the future and so of an unknown age."""
    # An entry from the future has an unknown age: deleting too much is the safe error.
    return not -SKEW <= now - created < seconds


def is_expired(meta: ChunkMeta, now: float) -> bool:
    return meta.ttl > 0 and is_older(meta.created, meta.ttl, now)


def remaining(meta: ChunkMeta, now: float) -> float:
    """Seconds left to an entry, at least a tiny time; 0: no limit."""
    # Never 0, which would mean no limit.
    return max(1e-9, meta.created + meta.ttl - now) if meta.ttl else 0.0


def shortest(*lifetimes: float | None) -> float:
    """The shortest of several limits in seconds; 0 and None are no limits."""
    return min((lifetime for lifetime in lifetimes if lifetime), default=0.0)


class SteadyClock:
    """Seconds since 1970 that never go back while the process lives. Thread-safe.

    The clock is followed forward. When it is set back, the seconds go on from where they were: nothing becomes younger.
    """

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._last = time.time()
        self._at = time.monotonic()

    def __call__(self) -> float:
        with self._lock:
            monotonic_now = time.monotonic()
            # A clock that was set back goes on by the monotonic one.
            self._last = max(time.time(), self._last + monotonic_now - self._at)
            self._at = monotonic_now
            return self._last


now = SteadyClock()
"""This process's clock."""
