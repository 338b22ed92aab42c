"""Rules of a store: what is worth storing, how partitions share its budgets, and lifetimes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cachetools import FIFOCache

from dejakv.errors import ConfigError
from dejakv.store.base import SNAPSHOT, StateInfo
from dejakv.store.forks import fork_safe_lock

Clock = Callable[[], float]
"""Returns seconds."""
PolicyName = Literal["lru", "lfu"]
POLICIES: dict[str, str] = {"lru": "used", "lfu": "hits, used"}
"""Order of eviction: least recently used, or least often and then least recently used."""
_AGE = "((SELECT used FROM clock) - used + 1.0)"
LEAST_SAVING = f"1.0 * hits * (stop - start) / nbytes / {_AGE} / {_AGE}, used"
"""Order of eviction of snapshots: uses times saved tokens, by bytes and the last use's age squared.

Beside the least recently used first it computes less of sessions in small budgets, and hardly more
elsewhere (docs/results/hybrid-sessions.md).
"""
SNAPSHOT_SHARE = 0.5
"""Largest part of a budget of bytes that snapshots of fixed state take."""

_REMEMBERED = 65_536
"""Number of the latest ids that are remembered for second sight."""


class NoRoom(Exception):
    """The entry does not fit the budget, whatever is evicted."""


@dataclass(frozen=True)
class Admission:
    """Admission rules of a store; zeros and False admit everything.

    Attributes
    ----------
    min_tokens : int
        Shorter prompts are refused (`too_short`).
    second_sight : bool
        A prompt is refused (`first_sight`) unless it is among the latest 65,536 that were seen:
        most prompts never repeat.
    max_write_rate : int
        Bytes a second; more is refused (`rate`). The first state over the limit still passes and is
        paid off before the next, so that a state larger than one second's bytes can be stored at
        all.

    Raises
    ------
    ConfigError
        For a negative limit.
    """

    min_tokens: int = 0
    second_sight: bool = False
    max_write_rate: int = 0

    def __post_init__(self) -> None:
        for name in ("min_tokens", "max_write_rate"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is negative: give a limit, or 0 for none"
                )


class AdmissionGate:
    """Applies an `Admission`. The caller keeps a lock: it is not thread-safe.

    Parameters
    ----------
    rules : Admission
        What is admitted.
    clock : Clock
        Seconds that only grow.
    """

    def __init__(self, rules: Admission, clock: Clock = time.monotonic) -> None:
        self._rules = rules
        self._clock = clock
        self._seen: FIFOCache[str, None] = FIFOCache(_REMEMBERED)
        self._allowance = float(rules.max_write_rate)
        self._filled = clock()

    def refusal_reason(self, id: str, tokens: int) -> str | None:
        """Return why not to capture a prompt (`too_short` or `first_sight`), or None.

        The call counts as a sight of the prompt, unless it is too short.
        """
        if tokens < self._rules.min_tokens:
            return "too_short"
        if self._rules.second_sight:
            seen_before = id in self._seen
            self._seen[id] = None
            if not seen_before:
                return "first_sight"
        return None

    def rate_refusal(self, nbytes: int, *, refuse: bool = True) -> str | None:
        """Count bytes against the write rate.

        Parameters
        ----------
        nbytes : int
            Bytes to write.
        refuse : bool
            False: these bytes come in any case, as the later parts of an admitted prompt do.

        Returns
        -------
        str | None
            `rate` if the limit is used up: then nothing is counted.
        """
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
    """Shares of a budget among partitions.

    Attributes
    ----------
    partitions : int
        Number of partitions, those in `named` included.
    max_bytes, max_entries : int
        The budget to share; 0: no limit.
    named : Mapping[str, PartitionBudget]
        Quotas of partitions by name. A quota without entries (or bytes) takes an equal share of
        what the others leave.

    Raises
    ------
    ConfigError
        If a partition would have no share, or more partitions have quotas than there are.
    """

    partitions: int = 1
    max_bytes: int = 0
    max_entries: int = 0
    named: Mapping[str, PartitionBudget] = field(default_factory=dict[str, PartitionBudget])

    def __post_init__(self) -> None:
        if len(self.named) > self.partitions:
            raise ConfigError(
                f"{len(self.named)} partitions have a quota of their own, and "
                f"partitions={self.partitions}: count them too"
            )

        for resource, budget, quotas in (
            ("bytes", self.max_bytes, [part.max_bytes for part in self.named.values()]),
            ("entries", self.max_entries, [part.max_entries for part in self.named.values()]),
        ):
            # Each partition without a quota must get at least one byte or entry.
            unnamed_count = self.partitions - sum(quota > 0 for quota in quotas)
            if budget and budget - sum(quotas) < unnamed_count:
                raise ConfigError(
                    f"a budget of {budget} {resource} has no part for each of {self.partitions} "
                    "partitions, of which some have "
                    f"{sum(quotas)} by name: raise it, lower their quotas, or give 0 for no limit"
                )

    @property
    def divided(self) -> bool:
        """Whether partitions have limits of their own."""
        return self.partitions > 1 or bool(self.named)

    def for_partition(self, partition: str) -> PartitionBudget:
        """Return the share of a partition. All partitions without a quota have equal shares."""
        named_budget = self.named.get(partition, PartitionBudget())
        # A quota of 0 is none: such a partition shares what the named ones leave.
        nbytes = named_budget.max_bytes or self._equal_share(
            self.max_bytes, [part.max_bytes for part in self.named.values()]
        )
        entries = named_budget.max_entries or self._equal_share(
            self.max_entries, [part.max_entries for part in self.named.values()]
        )
        return PartitionBudget(nbytes, entries)

    def scaled(self, max_bytes: int, max_entries: int = 0) -> "PartitionBudgets":
        """Return shares of another budget, in the same proportions of bytes.

        Where this budget has no limit in bytes, shares are equal; shares of entries always are.

        Parameters
        ----------
        max_bytes, max_entries : int
            The other budget; 0: no limit.

        Raises
        ------
        ConfigError
            If a partition would have no share of it.
        """
        shares = {
            name: PartitionBudget(max(1, part.max_bytes * max_bytes // self.max_bytes))
            for name, part in self.named.items()
            if part.max_bytes and self.max_bytes and max_bytes
        }
        return PartitionBudgets(self.partitions, max_bytes, max_entries, shares)

    def _equal_share(self, budget: int, quotas: Sequence[int]) -> int:
        unnamed_count = self.partitions - sum(quota > 0 for quota in quotas)
        return (budget - sum(quotas)) // unnamed_count if budget and unnamed_count else 0


@dataclass(frozen=True)
class Budget:
    """Limits of a store; 0: no limit.

    Attributes
    ----------
    max_bytes, max_entries : int
        Limits of all partitions together.
    policy : str
        Which entries are evicted first: `lru` or `lfu`.
    partition_budgets : PartitionBudgets
        Limits of partitions; each partition evicts only its own entries.
    snapshot_share : float
        Part of each limit of bytes that snapshots of fixed state may take, 0 to 1.

    Raises
    ------
    ConfigError
        For a negative limit, an unknown policy or a share outside of 0 to 1.
    """

    max_bytes: int = 0
    max_entries: int = 0
    policy: PolicyName = "lru"
    partition_budgets: PartitionBudgets = field(default_factory=PartitionBudgets)
    snapshot_share: float = SNAPSHOT_SHARE

    def __post_init__(self) -> None:
        if not 0 <= self.snapshot_share <= 1:
            raise ConfigError(
                f"snapshot_share={self.snapshot_share} is no part of a budget: give a number from "
                "0 to 1"
            )
        for name in ("max_bytes", "max_entries"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is negative: give a limit, or 0 for none"
                )
        if self.policy not in POLICIES:
            raise ConfigError(
                f"eviction policy {self.policy!r} is unknown: choose one of {', '.join(POLICIES)}"
            )

    def limits(self, partition: str, kind: str = "") -> list["BudgetLimit"]:
        """List the limits that an entry of a partition and a kind must meet."""
        partition_budget = self.partition_budgets.for_partition(partition)
        partition_limits: list[BudgetLimit] = []
        if self.partition_budgets.divided:
            max_bytes, max_entries = partition_budget.max_bytes, partition_budget.max_entries
            partition_limits = [
                *self._snapshot_limits(max_bytes, partition),
                BudgetLimit("quota", max_bytes, max_entries, partition),
            ]

        # Its own limit first: with that met, other partitions need not evict for it.
        limits = [*partition_limits, *self.shared_limits()]
        return [limit for limit in limits if limit.kind in ("", kind)]

    def shared_limits(self) -> list["BudgetLimit"]:
        """List the limits of all partitions together, each alone: evictions count by limit."""
        return [
            *self._snapshot_limits(self.max_bytes),
            BudgetLimit("entries", 0, self.max_entries),
            BudgetLimit("bytes", self.max_bytes, 0),
        ]

    def _snapshot_limits(self, max_bytes: int, partition: str | None = None) -> list["BudgetLimit"]:
        # Without a limit of bytes there is nothing to share.
        if not max_bytes or self.snapshot_share == 1:
            return []
        snapshot_bytes = max(1, int(max_bytes * self.snapshot_share))
        return [BudgetLimit("snapshots", snapshot_bytes, 0, partition, SNAPSHOT)]


class BudgetLimit(NamedTuple):
    """A limit of a store's content.

    Attributes
    ----------
    reason : str
        One of `dejakv.store.counters.EVICTION_REASONS`.
    max_bytes, max_entries : int
        The limit; 0: none.
    partition : str | None
        Whose entries count; None: all together.
    kind : str
        Kind of the entries that count and leave; empty: all.
    """

    reason: str
    max_bytes: int
    max_entries: int
    partition: str | None = None
    kind: str = ""


def parse_quotas(quotas: Sequence[str]) -> dict[str, PartitionBudget]:
    """Parse quotas `NAME=BYTES` or `NAME=BYTES:ENTRIES`.

    Returns
    -------
    dict[str, PartitionBudget]
        Quotas by partition.

    Raises
    ------
    ConfigError
        For a text of another form, or a name with two quotas.
    """
    budgets: dict[str, PartitionBudget] = {}
    for text in quotas:
        # The last `=`: a partition's name may hold one.
        name, separator, sizes = text.rpartition("=")
        numbers = sizes.split(":")
        if (
            not separator
            or len(numbers) > 2
            or not all(number.isascii() and number.isdigit() for number in numbers)
        ):
            raise ConfigError(
                f"quotas: {text[:80]!r} is none: give NAME=BYTES or NAME=BYTES:ENTRIES"
            )

        if name in budgets:
            raise ConfigError(f"the partition {name[:80]!r} has two quotas: give one")
        budgets[name] = PartitionBudget(*map(int, numbers))

    return budgets


SKEW = 5.0
"""Seconds by which a clock may be set back.

What was made later than now + SKEW was made by another clock, or before a larger step back.
"""


def is_older(created: float, seconds: float, now: float) -> bool:
    """Return whether an entry made at `created` is at least `seconds` old.

    An entry made more than `SKEW` seconds after `now` counts as old. Times are seconds since 1970.
    """
    # An entry from the future has an unknown age and counts as old: to delete too much is the safe
    # error.
    return not -SKEW <= now - created < seconds


def is_expired(meta: StateInfo, now: float) -> bool:
    """Return whether the lifetime of an entry is over."""
    return meta.ttl > 0 and is_older(meta.created, meta.ttl, now)


def remaining_seconds(meta: StateInfo, now: float) -> float:
    """Return the seconds left to an entry, at least 1e-9; 0 if it has no lifetime."""
    # Never 0, which would mean no limit.
    return max(1e-9, meta.created + meta.ttl - now) if meta.ttl else 0.0


def shortest_lifetime(*lifetimes: float | None) -> float:
    """Return the shortest of several limits in seconds; 0 and None (or no limits) mean no limit."""
    return min((lifetime for lifetime in lifetimes if lifetime), default=0.0)


class SteadyClock:
    """Seconds since 1970 that never go back while the process lives. Thread-safe.

    The system clock is followed forward. After it is set back, the seconds go on from where they
    were: no entry becomes younger.
    """

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._last = time.time()
        self._last_monotonic = time.monotonic()

    def __call__(self) -> float:
        """Return the seconds since 1970."""
        with self._lock:
            monotonic_now = time.monotonic()
            # A clock that was set back goes on by the monotonic one.
            self._last = max(time.time(), self._last + monotonic_now - self._last_monotonic)
            self._last_monotonic = monotonic_now
            return self._last


now = SteadyClock()
"""The clock of this process."""
