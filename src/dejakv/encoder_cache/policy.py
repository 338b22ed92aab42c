"""The order of eviction: each policy is one number; the entry with the smallest leaves first, ties by recency.

A policy's number never falls while an entry is hit (its use count and the clock only grow), so the
queue can leave hits unsorted (see eviction.py).
"""

from collections.abc import Callable
from typing import Literal

from dejakv.errors import ConfigError

PolicyName = Literal["lfu", "lru", "cost"]

Priority = Callable[[float, int, float], float]
"""`priority(age, uses, worth)`: `age` is the number of the last entry evicted (0 at first), `uses` the number of
requests for the entry (1 when stored), `worth` the encoder seconds a MiB of it saves each time."""


def lfu(age: float, uses: int, worth: float) -> float:
    """LFU with dynamic ageing: `age + uses` (LFU-DA, Arlitt et al., "Evaluating content management techniques for Web
    proxy caches", 2000).

    The age rises to the number of the evicted entry, so a formerly popular entry outlives about `uses` full turns of
    the cache and no more.
    """
    return age + uses


def lru(age: float, uses: int, worth: float) -> float:
    """All equal: recency alone decides."""
    return 0.0


def cost(age: float, uses: int, worth: float) -> float:
    """Encoder seconds saved: `age + uses * encoder seconds / MiB` (GreedyDual-Size-Frequency, Cherkasova 1998)."""
    return age + uses * worth


_POLICIES: dict[str, Priority] = {"lfu": lfu, "lru": lru, "cost": cost}


def policy_named(name: str) -> Priority:
    """The policy of that name; ConfigError for another name."""
    if name not in _POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}: use one of {', '.join(_POLICIES)}")
    return _POLICIES[name]
