"""Who has which part of a budget: named partitions what an operator gives them, the others equal parts of the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dejakv.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """What one partition may hold; 0 bytes or entries: no limit of its own."""

    max_bytes: int = 0
    max_entries: int = 0


@dataclass(frozen=True)
class Parts:
    """The parts of a budget of `max_bytes` and `max_entries` (0: none) among `partitions` partitions, the named ones included.

    named  parts of partitions by name; one without entries shares those that are left with the others

    Raises: ConfigError if a partition would have no part.
    """

    partitions: int = 1
    max_bytes: int = 0
    max_entries: int = 0
    named: Mapping[str, Part] = field(default_factory=dict[str, Part])

    def __post_init__(self) -> None:
        if len(self.named) > self.partitions:
            raise ConfigError(
                f"{len(self.named)} partitions have a quota of their own, and partitions={self.partitions}: count them too"
            )
        for what, budget, given in (
            ("bytes", self.max_bytes, [part.max_bytes for part in self.named.values()]),
            ("entries", self.max_entries, [part.max_entries for part in self.named.values()]),
        ):
            others = self.partitions - sum(one > 0 for one in given)
            if budget and budget - sum(given) < others:
                raise ConfigError(
                    f"a budget of {budget} {what} has no part for each of {self.partitions} partitions, of which some have "
                    f"{sum(given)} by name: raise it, lower their quotas, or give 0 for no limit"
                )

    @property
    def divided(self) -> bool:
        """Whether partitions have limits of their own."""
        return self.partitions > 1 or bool(self.named)

    def of(self, partition: str) -> Part:
        """The part of one partition, as large as that of each other one without a name."""
        own = self.named.get(partition, Part())
        nbytes = own.max_bytes or self._equal(self.max_bytes, [part.max_bytes for part in self.named.values()])
        entries = own.max_entries or self._equal(self.max_entries, [part.max_entries for part in self.named.values()])
        return Part(nbytes, entries)

    def scaled(self, max_bytes: int, max_entries: int = 0) -> "Parts":
        """The same proportions of another budget in bytes, in equal parts where this one has no limit; entries in equal parts."""
        shares = {
            name: Part(max(1, part.max_bytes * max_bytes // self.max_bytes))
            for name, part in self.named.items()
            if part.max_bytes and self.max_bytes and max_bytes
        }
        return Parts(self.partitions, max_bytes, max_entries, shares)

    def _equal(self, budget: int, given: Sequence[int]) -> int:
        others = self.partitions - sum(one > 0 for one in given)
        return (budget - sum(given)) // others if budget and others else 0


def named_parts(quotas: Sequence[str]) -> dict[str, Part]:
    """Parts by partition from texts `NAME=BYTES` or `NAME=BYTES:ENTRIES`. Raises: ConfigError for another text."""
    parts: dict[str, Part] = {}
    for text in quotas:
        name, found, sizes = text.rpartition("=")
        numbers = sizes.split(":")
        if not found or len(numbers) > 2 or not all(number.isascii() and number.isdigit() for number in numbers):
            raise ConfigError(f"quotas: {text[:80]!r} is none: give NAME=BYTES or NAME=BYTES:ENTRIES")
        if name in parts:
            raise ConfigError(f"the partition {name[:80]!r} has two quotas: give one")
        parts[name] = Part(*map(int, numbers))
    return parts
