"""How much room a cache takes."""

from typing import Any

from dejakv.cache import HierarchicalCache


def sizes_of(cache: HierarchicalCache) -> dict[str, Any]:
    """Bytes of stored chunks, of the vectors in the indexes, and what the encoder registry holds."""
    stats = cache.store.stats()
    sizes: dict[str, Any] = {
        "store_bytes": stats.bytes,
        "store_entries": stats.entries,
        "bytes_per_chunk": round(stats.bytes / stats.entries) if stats.entries else 0,
        "index_bytes": sum(int(getattr(level, "nbytes", 0)) for level in cache.finder.levels),
        "evictions": dict(stats.evictions),
        "corrupt": stats.corrupt,
    }
    counts = cache.embed_counts
    if counts:
        sizes["hook_counts"] = counts
    return sizes
