"""One call that makes the store that settings ask for."""

from pathlib import Path

from dejakv.config import SemanticCacheConfig
from dejakv.store.admission import Admission, AdmittingStore
from dejakv.store.base import Store
from dejakv.store.disk import DiskStore
from dejakv.store.eviction import PolicyName
from dejakv.store.memory import MemoryStore
from dejakv.store.tiered import Fill, TieredStore


def open_store(
    cache_dir: str | Path | None = None,
    *,
    max_bytes: int = 0,
    max_entries: int = 0,
    policy: PolicyName = "lru",
    memory_bytes: int = 0,
    memory_fill: Fill = "write",
    redis_url: str | None = None,
    min_tokens: int = 0,
    second_sight: bool = False,
    max_write_rate: int = 0,
) -> Store:
    """The store that these settings ask for; a limit of 0 is no limit.

    cache_dir     None keeps chunks in this process's memory; a folder keeps them on disk
    memory_bytes  of a store on disk, what is also kept in memory (0: nothing)
    memory_fill   whether it is put there when it is written or when it is first read
    redis_url     a further tier behind it in Redis or Valkey, under the same budgets (needs the extra `redis`)
    min_tokens, second_sight, max_write_rate  see `Admission`

    Raises: StoreError if the folder cannot be used, ConfigError for wrong limits, MissingExtraError without `redis`.
    """
    rules = Admission(min_tokens, second_sight, max_write_rate)
    store: Store
    if cache_dir is None:
        store = MemoryStore(max_bytes, max_entries, policy)
    else:
        store = DiskStore(cache_dir, max_bytes, max_entries, policy)
        if memory_bytes:
            store = TieredStore(MemoryStore(memory_bytes, max_entries, policy), store, memory_fill)
    if redis_url is not None:
        # Imported here: redis is an optional dependency.
        from dejakv.store.redis import RedisStore

        store = TieredStore(store, RedisStore(redis_url, max_bytes, max_entries, policy))
    return store if rules == Admission() else AdmittingStore(store, rules)


def store_of(config: SemanticCacheConfig, memory_fill: Fill = "write") -> Store:
    """The store of a cache's settings. `memory_fill` and errors: as `open_store`."""
    return open_store(
        config.cache_dir,
        max_bytes=config.max_bytes,
        max_entries=config.max_cached_blocks,
        policy=config.policy,
        memory_bytes=config.memory_bytes,
        memory_fill=memory_fill,
        min_tokens=config.min_tokens,
        second_sight=config.second_sight,
        max_write_rate=config.max_write_rate,
    )
