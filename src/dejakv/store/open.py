"""One call that makes the store that settings ask for."""

from pathlib import Path

from dejakv.store.base import Store
from dejakv.store.disk import DiskStore
from dejakv.store.eviction import PolicyName
from dejakv.store.memory import MemoryStore


def open_store(
    cache_dir: str | Path | None = None,
    *,
    max_bytes: int = 0,
    max_entries: int = 0,
    policy: PolicyName = "lru",
) -> Store:
    """In memory without `cache_dir`, else on disk."""
    if cache_dir is None:
        return MemoryStore(max_bytes, max_entries, policy)
    return DiskStore(cache_dir, max_bytes, max_entries, policy)
