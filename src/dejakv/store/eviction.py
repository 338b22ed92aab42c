"""The order of eviction. A policy is an order of usage fields; a store evicts the first entry in that order.

lru  least recently used                  (last_used)
lfu  least often used, then least recently (hits, last_used)
"""

from dataclasses import dataclass
from typing import Literal

from dejakv.errors import ConfigError

PolicyName = Literal["lru", "lfu"]


@dataclass(frozen=True)
class Usage:
    """The use of an entry. `last_used` counts uses of the whole store, so it never repeats."""

    hits: int = 0
    last_used: int = 0


@dataclass(frozen=True)
class Policy:
    """`fields` of `Usage`, most significant first. The same names order the rows of a store on disk."""

    name: str
    fields: tuple[str, ...]

    def priority(self, usage: Usage) -> tuple[int, ...]:
        """The entry of the lowest priority is evicted first."""
        return tuple(getattr(usage, name) for name in self.fields)


POLICIES = {
    "lru": Policy("lru", ("last_used",)),
    "lfu": Policy("lfu", ("hits", "last_used")),
}


def policy_named(name: str) -> Policy:
    """Raises: ConfigError that lists the known policies."""
    if name not in POLICIES:
        raise ConfigError(f"eviction policy {name!r} is unknown: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]


@dataclass(frozen=True)
class Budget:
    """Limits of a store; 0: no limit."""

    max_bytes: int = 0
    max_entries: int = 0

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_entries"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative: give a limit, or 0 for none")

    def excess_bytes(self, total: int) -> int:
        return max(0, total - self.max_bytes) if self.max_bytes else 0

    def excess_entries(self, total: int) -> int:
        return max(0, total - self.max_entries) if self.max_entries else 0
