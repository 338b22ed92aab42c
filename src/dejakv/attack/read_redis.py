"""Reads from Redis servers: `python -m dejakv.attack.read_redis IDS URL...`."""

from dejakv.attack.reading import main
from dejakv.store.base import Store
from dejakv.store.breaker import Breaker
from dejakv.store.deltas import DeltaStore
from dejakv.store.redis import RedisStore

LARGEST = 1 << 20
"""Bytes of a chunk."""
SECONDS = 0.3


def opened(url: str) -> Store:
    """A store that asks again after every failure."""
    return DeltaStore(RedisStore(url, max_chunk=LARGEST, timeout=SECONDS, breaker=Breaker(failures=10**9)))


if __name__ == "__main__":
    main(opened)
