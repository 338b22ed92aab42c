"""VisualKVCache: encoder outputs computed once, shared by all requests with the same picture, sound or clip."""

import math
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Self

from dejakv.encoder_cache.block import Resolution, VisualCacheResult, VisualEmbeddingBlock
from dejakv.encoder_cache.controller import StableBlocks
from dejakv.encoder_cache.dp_mode import DpModeRecommendation, recommend_dp_mode
from dejakv.encoder_cache.policy import PolicyName, policy_named
from dejakv.encoder_cache.registry import Registry
from dejakv.encoder_cache.shelf import Shelf
from dejakv.encoder_cache.shelves import Shelves
from dejakv.encoder_cache.stats import EncoderCacheStats
from dejakv.encoder_cache.tier import Tier
from dejakv.encoder_cache.view import EncoderView, compute_content_hash
from dejakv.errors import ConfigError
from dejakv.quotas import Parts
from dejakv.request import DEFAULT_PARTITION
from dejakv.store.selection import Purged, Selection


class VisualKVCache:
    """One registry of encoder outputs, one budget, several views. Thread-safe; usable from any number of event loops.

    max_entries, max_vram_bytes  the budgets, for all partitions together; no admission filter: every output that fits is kept
    queueing_controller          gives the fewest entries that evictions may leave (see QueueingController)
    policy                       eviction order: "lfu" (least used first, with ageing), "lru" (least recently used) or "cost"
                                 (fewest encoder seconds saved a byte); ties by recency. See policy.py
    disk                         storage that outlives the process (`disk.DiskTier`), none by default
    ttl                          seconds for which an output may be used from its computation on, 0 without a limit
    parts                        what each partition has of the budgets in proportion; None: one budget for all
    check_finite                 refuse embeddings with NaN or infinity; False keeps them as they are

    Engines use `view(encoder_epoch, partition)`. The methods of the same names here are for programs with one encoder and
    one tenant: they act on the view of `encoder_epoch=""` and the default partition.
    """

    def __init__(
        self,
        max_entries: int = 100,
        max_vram_bytes: int = 4 * 1024**3,
        queueing_controller: StableBlocks | None = None,
        policy: PolicyName = "lfu",
        *,
        disk: Tier | None = None,
        check_finite: bool = True,
        ttl: float = 0.0,
        parts: Parts | None = None,
    ) -> None:
        if max_entries < 1 or max_vram_bytes < 1:
            raise ConfigError(
                f"max_entries={max_entries} and max_vram_bytes={max_vram_bytes} must both be 1 or more: "
                "to run without an encoder cache, do not pass one to the engine"
            )
        if not 0 <= ttl < math.inf:
            raise ConfigError(f"ttl={ttl} is no time: give a number of seconds, or 0 for no limit")
        self.max_entries = max_entries
        self.max_vram_bytes = max_vram_bytes
        self.policy = policy
        self.queueing_controller = queueing_controller
        priority = policy_named(policy)
        shelf = (
            Shelves(parts.scaled(max_vram_bytes, max_entries), priority, self._minimum)
            if parts is not None and parts.divided
            else Shelf(max_entries, max_vram_bytes, priority, self._minimum)
        )
        self._registry = Registry(shelf, disk, check_finite, ttl)
        self._default = self.view("", DEFAULT_PARTITION)
        self._recommended = 0
        self._recommended_lock = threading.Lock()

    def view(
        self,
        encoder_epoch: str,
        partition: str = DEFAULT_PARTITION,
        *,
        encoder_model: str = "",
        place: Callable[[Any], Any] | None = None,
    ) -> EncoderView:
        """The cache as one encoder of one partition sees it; see EncoderView. Views are cheap and keep no state."""
        return EncoderView(self._registry, encoder_epoch, partition, encoder_model, place)

    def compute_content_hash(self, raw_bytes: bytes) -> str:
        """SHA-256 of the raw bytes, 64 hexadecimal digits. InputError if there are none."""
        return compute_content_hash(raw_bytes)

    def lookup(self, content_hash: str, modality: str = "image") -> VisualEmbeddingBlock | None:
        """See `EncoderView.lookup`."""
        return self._default.lookup(content_hash, modality)

    def store(
        self,
        content_hash: str,
        modality: str,
        embedding: Any,
        resolution: Resolution | None = None,
        encoder_model: str = "",
        encoder_seconds: float | None = None,
    ) -> VisualEmbeddingBlock | None:
        """See `EncoderView.store`. The label `encoder_model` is not part of the key: use two views for two models."""
        return self._default.store(content_hash, modality, embedding, resolution, encoder_model, encoder_seconds)

    def get_or_compute(
        self, content_hash: str, modality: str, compute: Callable[[], Any], resolution: Resolution | None = None
    ) -> Any:
        """See `EncoderView.get_or_compute`."""
        return self._default.get_or_compute(content_hash, modality, compute, resolution)

    async def aget_or_compute(
        self,
        content_hash: str,
        modality: str,
        compute: Callable[[], Any] | Callable[[], Awaitable[Any]],
        resolution: Resolution | None = None,
    ) -> Any:
        """See `EncoderView.aget_or_compute`."""
        return await self._default.aget_or_compute(content_hash, modality, compute, resolution)

    def serve(
        self,
        raw_bytes: bytes,
        compute: Callable[[], Any],
        modality: str = "image",
        resolution: Resolution | None = None,
        batch_image_count: int = 1,
        encoder_depth: int = 27,
    ) -> VisualCacheResult:
        """All steps for one medium: hash, lookup, encoding if necessary, and the recommendation of DP mode."""
        return self._default.serve(
            raw_bytes,
            compute,
            modality,
            resolution,
            dp_mode=lambda: self.get_dp_mode_recommendation(batch_image_count, resolution or (512, 512), encoder_depth),
        )

    def clear(self, partition: str | None = None) -> None:
        """Drops the entries and figures of one partition, or all, in memory and on disk."""
        self._registry.clear(partition)
        if partition is None:
            with self._recommended_lock:
                self._recommended = 0

    def purge(self, selection: Selection, *, dry_run: bool = False) -> Purged:
        """Drops selected entries for good, in memory and on disk; what was dropped, or with `dry_run` would be. An
        output in both counts once.

        Raises: StoreError if the disk cannot be purged.
        """
        return self._registry.purge(selection, dry_run=dry_run)

    def flush(self) -> None:
        """Returns when everything stored so far is on disk. Nothing to do without a disk tier."""
        if self._registry.tier is not None:
            self._registry.tier.flush()

    def close(self) -> None:
        """Flushes and closes the disk tier. What is in memory stays usable."""
        if self._registry.tier is not None:
            self._registry.tier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def dp_mode(
        self, batch_image_count: int, image_resolution: Resolution = (512, 512), encoder_depth: int = 27
    ) -> DpModeRecommendation:
        """Whether vLLM should encode data-parallel, the reason, and the flag; a yes is counted. See dp_mode.py."""
        recommendation = recommend_dp_mode(batch_image_count, image_resolution, encoder_depth)
        if recommendation.recommended:
            with self._recommended_lock:
                self._recommended += 1
        return recommendation

    def get_dp_mode_recommendation(
        self, batch_image_count: int, image_resolution: Resolution = (512, 512), encoder_depth: int = 27
    ) -> bool:
        """The same as a plain yes or no."""
        return self.dp_mode(batch_image_count, image_resolution, encoder_depth).recommended

    def stats(self, partition: str | None = None) -> EncoderCacheStats:
        """The figures of one partition, or of all together (for the operator, not for tenants)."""
        return self._registry.stats(partition, self._recommended if partition is None else 0)

    def get_cache_stats(self, partition: str | None = None) -> dict[str, Any]:
        """The same as a dictionary with the exported names; see docs/metrics.md."""
        return self.stats(partition).as_dict()

    def _minimum(self) -> int:
        controller = self.queueing_controller
        return controller.get_minimum_stable_blocks() if controller is not None else 0
