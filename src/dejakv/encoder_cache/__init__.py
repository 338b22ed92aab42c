"""Encoder outputs by content: computed once, and shared by all requests with the same medium.

A view has the outputs of one encoder and one partition:

    cache = VisualKVCache(max_vram_bytes=2 * 1024**3)
    view = cache.view(encoder_epoch, partition)
    embedding = view.get_or_compute(content_hash, "image", lambda: encoder(pixels))
"""

from dejakv.encoder_cache.outputs import VisualEmbeddingBlock
from dejakv.encoder_cache.stats import EncoderCacheStats
from dejakv.encoder_cache.visual_kv_cache import (
    DpModeRecommendation,
    EncoderView,
    QueueingController,
    VisualCacheResult,
    VisualKVCache,
    compute_content_hash,
    recommend_dp_mode,
)

__all__ = [
    "DpModeRecommendation",
    "EncoderCacheStats",
    "EncoderView",
    "QueueingController",
    "VisualCacheResult",
    "VisualEmbeddingBlock",
    "VisualKVCache",
    "compute_content_hash",
    "recommend_dp_mode",
]
