"""One call that opens the store described by settings."""

from collections.abc import Sequence
from pathlib import Path

from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError, StoreError
from dejakv.quotas import Parts, named_parts
from dejakv.settings import refuse_redis
from dejakv.store import names
from dejakv.store.admission import Admission, AdmittingStore
from dejakv.store.base import Store
from dejakv.store.claim import entrance, identify
from dejakv.store.deltas import DeltaStore
from dejakv.store.disk import DiskStore
from dejakv.store.eviction import Budget, PolicyName
from dejakv.store.expiry import ExpiringStore
from dejakv.store.memory import MemoryStore
from dejakv.store.quota import shared_out
from dejakv.store.tiered import Fill, TieredStore

_MEMORY = "memory://"


def open_store(
    folder_or_url: str | Path | None = None,
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
    partitions: int = 1,
    quotas: Sequence[str] = (),
) -> Store:
    """A store of chunks; close it when done. A limit of 0 is no limit. What prompts begin with alike is stored once.

    folder_or_url  None or `memory://` keeps chunks in this process's memory; a folder keeps them on disk, where it must be
                   empty, missing or a store
    max_bytes, max_entries  budgets; beyond them `policy` (`lru` or `lfu`) evicts
    memory_bytes   of a store on disk, the part also kept in memory (0: none)
    memory_fill    when a chunk enters memory: on writing or on the first read
    redis_url      refused: Redis is no longer a store
    min_tokens, second_sight, max_write_rate  see `Admission`
    partitions     number of parts of the budgets; each partition is limited to one part and evicts only its own entries
    quotas         parts of named partitions as `NAME=BYTES[:ENTRIES]`; the others share the rest

    Raises: StoreError if the folder cannot be used, ConfigError for a wrong url or limit.
    """
    Budget(max_bytes, max_entries)  # refuses negative ones
    parts = Parts(partitions, max_bytes, max_entries, named_parts(quotas))
    rules = Admission(min_tokens, second_sight, max_write_rate)
    if redis_url is not None:
        refuse_redis("redis://")
    if isinstance(folder_or_url, str):
        refuse_redis(folder_or_url)
    url = folder_or_url if isinstance(folder_or_url, str) and "://" in folder_or_url else None
    store: Store
    if folder_or_url is None or url == _MEMORY:
        store = MemoryStore(max_bytes, max_entries, policy)
    elif url is not None:
        raise ConfigError(f"the store {url!r} is of an unknown kind: give a folder or {_MEMORY}")
    else:
        store = DiskStore(folder_or_url, max_bytes, max_entries, policy)
        if memory_bytes:
            front = MemoryStore(memory_bytes, max_entries, policy, in_front=True)
            front = shared_out(front, parts.scaled(memory_bytes, max_entries), policy, in_front=True)
            store = TieredStore(front, store, memory_fill)
    store = ExpiringStore(DeltaStore(shared_out(store, parts, policy)))
    return store if rules == Admission() else AdmittingStore(store, rules)


def folders_of(folder: str | Path) -> list[Path]:
    """The folder of a store, and those of tensor-parallel ranks below it; nothing is created.

    Raises: StoreError if it is none, or cannot be read; ConfigError for a Redis address.
    """
    refuse_redis(str(folder))
    folder = Path(folder)
    try:
        with entrance(folder) as directory:
            found = [folder] if identify(directory) is not None else []
            found += [folder / name for name in sorted(directory.names()) if names.is_rank(name)]
    except OSError as error:
        raise StoreError(f"{folder} cannot be read ({error.strerror}): give the folder of a cache") from error
    if not found:
        raise StoreError(f"{folder} is empty, and no cache: give the folder of one")
    return found


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
        partitions=config.partitions,
        quotas=config.quotas,
    )
