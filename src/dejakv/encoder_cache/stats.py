"""The cache's figures: counters of each partition, and the values returned to callers."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dejakv.encoder_cache.outputs import VisualEmbeddingBlock


@dataclass(slots=True)
class Counters:
    """Counters of one partition. Changed under the registry's lock alone."""

    hits: int = 0
    misses: int = 0
    coalesced: int = 0
    disk_hits: int = 0
    disk_misses: int = 0
    disk_corrupt: int = 0
    encoder_runs: int = 0
    encoder_failures: int = 0
    encoder_seconds: float = 0.0
    encoder_seconds_saved: float = 0.0
    vram_saved_bytes: int = 0
    evictions: Counter[str] = field(default_factory=Counter[str])
    refusals: Counter[str] = field(default_factory=Counter[str])

    def served(self, block: VisualEmbeddingBlock) -> None:
        """Counts an output delivered without running the encoder."""
        self.hits += 1
        self.vram_saved_bytes += block.estimated_vram_bytes
        self.encoder_seconds_saved += block.encoder_seconds or 0.0


@dataclass(frozen=True)
class EncoderCacheStats:
    """Counters since the start (or the last clear) and, from `entries` on, present values.

    hits       callers that got an output without an encoder run of their own: from memory, from disk, or (counted
               again as `coalesced`) by waiting for another caller's run
    misses     callers that needed an encoder run, and lookups that found nothing
    evictions  evicted entries, by reason: `entries` and `bytes` (a budget), `replaced`
    refusals   outputs not kept, by reason: `oversized`, `minimum`
    """

    hits: int = 0
    misses: int = 0
    coalesced: int = 0
    disk_hits: int = 0
    disk_misses: int = 0
    disk_corrupt: int = 0
    encoder_runs: int = 0
    encoder_failures: int = 0
    encoder_seconds: float = 0.0
    encoder_seconds_saved: float = 0.0
    vram_saved_bytes: int = 0
    dp_mode_recommendations: int = 0
    evictions: Mapping[str, int] = field(default_factory=dict[str, int])
    refusals: Mapping[str, int] = field(default_factory=dict[str, int])
    entries: int = 0
    bytes: int = 0
    max_entries: int = 0
    max_bytes: int = 0
    waiting_callers: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits divided by hits plus misses; 0 before the first."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The figures under their exported names."""
        return {
            "visual_cache_hits": self.hits,
            "visual_cache_misses": self.misses,
            "visual_cache_hit_rate": self.hit_rate,
            "visual_vram_saved_bytes": self.vram_saved_bytes,
            "visual_cache_entries": self.entries,
            "dp_mode_recommendations": self.dp_mode_recommendations,
            "visual_cache_coalesced": self.coalesced,
            "visual_cache_bytes": self.bytes,
            "visual_cache_max_entries": self.max_entries,
            "visual_cache_max_bytes": self.max_bytes,
            "visual_cache_waiting_callers": self.waiting_callers,
            "visual_cache_evictions": dict(self.evictions),
            "visual_cache_refusals": dict(self.refusals),
            "visual_disk_hits": self.disk_hits,
            "visual_disk_misses": self.disk_misses,
            "visual_disk_corrupt": self.disk_corrupt,
            "visual_encoder_runs": self.encoder_runs,
            "visual_encoder_failures": self.encoder_failures,
            "visual_encoder_seconds": self.encoder_seconds,
            "visual_encoder_seconds_saved": self.encoder_seconds_saved,
        }


_SUMMED = (
    *("hits", "misses", "coalesced", "disk_hits", "disk_misses", "disk_corrupt", "vram_saved_bytes"),
    *("encoder_runs", "encoder_failures", "encoder_seconds", "encoder_seconds_saved"),
)


def summed(counters: Iterable[Counters], **now: int) -> EncoderCacheStats:
    """The figures of several partitions together; `now`: present values, by their names in EncoderCacheStats."""
    parts = list(counters)
    return EncoderCacheStats(
        **{name: sum(getattr(part, name) for part in parts) for name in _SUMMED},
        evictions=dict(sum((part.evictions for part in parts), Counter[str]())),
        refusals=dict(sum((part.refusals for part in parts), Counter[str]())),
        **now,
    )
