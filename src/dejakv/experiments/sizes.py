"""Size of a cache, and what is known of its error bound."""

from dataclasses import asdict
from typing import Any

from dejakv.cache import HierarchicalCache
from dejakv.engines.base import HoldsState
from dejakv.store.counters import FAILED_WRITES


def sizes_of(cache: HierarchicalCache, engine: object) -> dict[str, Any]:
    """Bytes of stored chunks (in the engine, if it keeps state itself), of the vectors in the indexes, and of the encoder registry; `trust` is
    the `TrustReport`, where there is an error bound."""
    stats = cache.store.stats()
    held = engine.state_bytes() if isinstance(engine, HoldsState) else stats.bytes
    sizes: dict[str, Any] = {
        "store_bytes": held,
        "store_entries": stats.entries,
        "bytes_per_chunk": round(held / stats.entries) if stats.entries else 0,
        "index_bytes": sum(int(getattr(level, "nbytes", 0)) for level in cache.finder.levels),
        "evictions": dict(stats.evictions),
        "corrupt": stats.corrupt,
        "failed_writes": {reason: stats.refused[reason] for reason in FAILED_WRITES if stats.refused.get(reason)},
    }
    counts = cache.embed_counts
    if counts:
        sizes["hook_counts"] = counts
    trust = cache.trust(None)
    if trust is not None:
        sizes["trust"] = asdict(trust)
    return sizes
