"""Size of a cache."""

from typing import Any

from dejakv.cache import HierarchicalCache
from dejakv.engines.base import HoldsState


def sizes_of(cache: HierarchicalCache, engine: object) -> dict[str, Any]:
    """Bytes of stored chunks (in the engine, if it keeps state itself), of the vectors in the indexes, and of the encoder registry."""
    stats = cache.store.stats()
    held = engine.state_bytes() if isinstance(engine, HoldsState) else stats.bytes
    sizes: dict[str, Any] = {
        "store_bytes": held,
        "store_entries": stats.entries,
        "bytes_per_chunk": round(held / stats.entries) if stats.entries else 0,
        "index_bytes": sum(int(getattr(level, "nbytes", 0)) for level in cache.finder.levels),
        "evictions": dict(stats.evictions),
        "corrupt": stats.corrupt,
    }
    counts = cache.embed_counts
    if counts:
        sizes["hook_counts"] = counts
    return sizes
