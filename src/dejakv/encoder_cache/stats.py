"""Figures of the encoder cache."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Self


@dataclass(slots=True)
class EncoderCacheStats:
    """Counters since the start (or the last clear) and, from `entries` on, present values.

    Attributes
    ----------
    hits : int
        Callers that got an output without an encoder run of their own: from memory, from disk, or
        (counted again as `coalesced`) by waiting for another caller's run.
    misses : int
        Callers that needed an encoder run, and lookups that found nothing.
    disk_hits, disk_misses, disk_corrupt : int
        Reads of the disk that gave an output, that gave none, and of these the damaged ones.
    encoder_runs, encoder_failures : int
        Runs that gave an output, and runs that raised an error.
    encoder_seconds, encoder_seconds_saved : float
        Time of the runs, and the time that hits would have taken.
    vram_saved_bytes : int
        Bytes of the outputs that hits delivered.
    evictions : Counter[str]
        Evicted entries, by reason: `entries` and `bytes` (a budget), `replaced`.
    refusals : Counter[str]
        Outputs not kept, by reason: `oversized`, `minimum`.
    entries, bytes : int
        Outputs in memory, and their size.
    waiting_callers : int
        Callers that wait for another caller's run.
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
    evictions: Counter[str] = field(default_factory=Counter[str])
    refusals: Counter[str] = field(default_factory=Counter[str])
    entries: int = 0
    bytes: int = 0
    max_entries: int = 0
    max_bytes: int = 0
    waiting_callers: int = 0

    @classmethod
    def total(cls, parts: Iterable["EncoderCacheStats"]) -> Self:
        """Add up the figures of several partitions."""
        total = cls()
        for part in parts:
            for figure in fields(cls):
                setattr(
                    total, figure.name, getattr(total, figure.name) + getattr(part, figure.name)
                )

        return total

    @property
    def hit_rate(self) -> float:
        """Hits divided by hits plus misses; 0 before the first."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the figures under their exported names."""
        figures: dict[str, Any] = {"visual_cache_hit_rate": self.hit_rate}
        for figure in fields(self):
            figures[_exported(figure.name)] = getattr(self, figure.name)
        figures |= {
            "visual_cache_evictions": dict(self.evictions),
            "visual_cache_refusals": dict(self.refusals),
        }
        return figures


def _exported(name: str) -> str:
    if name == "dp_mode_recommendations":
        return name
    return (
        f"visual_{name}"
        if name.startswith(("disk_", "encoder_", "vram_"))
        else f"visual_cache_{name}"
    )
