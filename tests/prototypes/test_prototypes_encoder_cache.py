"""VisualKVCache as its file has it: the same calls, fields and figures."""

import hashlib
import inspect
import logging

import numpy as np
import pytest
from tests.prototypes.conftest import Names

from dejakv import VisualEmbeddingBlock, VisualKVCache
from dejakv.encoder_cache import DpModeRecommendation
from dejakv.prototypes import QueueingController, VisualCacheResult


class KeepsTwo(QueueingController):
    def get_minimum_stable_blocks(self) -> int:
        return 2


def test_encoder_cache() -> None:
    names = Names("encoder_cache")
    defaults = inspect.signature(VisualKVCache).parameters
    assert defaults["max_entries"].default == 100
    assert defaults["max_vram_bytes"].default == 4 * 1024**3
    assert QueueingController().get_minimum_stable_blocks() == 0
    cache = VisualKVCache(max_entries=2, max_vram_bytes=10_000, queueing_controller=KeepsTwo())
    raw = b"a picture"
    content_hash = cache.compute_content_hash(raw)
    assert content_hash == hashlib.sha256(raw).hexdigest()
    assert cache.lookup(content_hash, "image") is None
    embedding = np.ones((4, 8), np.float32)
    block = cache.store(content_hash, "image", embedding, resolution=(640, 480), encoder_model="a label")
    assert isinstance(block, VisualEmbeddingBlock)
    assert (block.resolution, block.encoder_model, block.estimated_vram_bytes) == ((640, 480), "a label", 4 * 8 * 4)
    held = cache.lookup(content_hash)
    assert held is not None
    assert (held.access_count, held.content_hash, held.modality) == (1, content_hash, "image")
    assert held.created_at > 0
    assert np.array_equal(held.embedding, embedding)
    for number in range(3):
        cache.store(f"{number}", "image", embedding)
    stats = cache.get_cache_stats()
    assert stats["visual_cache_entries"] == 2  # neither beyond max_entries nor below the controller's minimum
    assert (stats["visual_cache_hits"], stats["visual_cache_misses"], stats["visual_cache_hit_rate"]) == (1, 1, 0.5)
    assert stats["visual_vram_saved_bytes"] == 128
    names.having(held, "VisualEmbeddingBlock.")
    result = cache.serve(raw, lambda: embedding, batch_image_count=2)
    assert isinstance(result, VisualCacheResult)
    assert (result.cache_hit, result.content_hash, result.reuse_count) == (True, content_hash, 2)
    assert (result.vram_saved_bytes, result.dp_mode_recommended) == (128, True)
    names.having(result, "VisualCacheResult.")
    wanted = [(2, (64, 64), 1, True), (1, (512, 512), 1, True), (1, (64, 64), 45, True), (1, (64, 64), 27, False)]
    for count, resolution, depth, yes in [*wanted, (10, (256, 256), 50, False)]:
        assert cache.get_dp_mode_recommendation(count, resolution, depth) is yes
    assert DpModeRecommendation.FLAG == ("--mm-encoder-tp-mode", "data")
    names.having(cache.get_cache_stats())
    cache.clear()
    empty = cache.get_cache_stats()
    assert {empty["visual_cache_hits"], empty["visual_cache_entries"], empty["dp_mode_recommendations"]} == {0}
    names.having(cache, "VisualKVCache.")
    names.having(cache)
    names.having(QueueingController, "QueueingController.")
    names("VisualKVCache", "VisualEmbeddingBlock", "VisualCacheResult", "QueueingController")
    names("--mm-encoder-tp-mode data")
    names.done()


def test_encoder_cache_log(caplog: pytest.LogCaptureFixture) -> None:
    """A line for each of the five events, with the beginning of the content's hash and no more of the key."""
    names = Names("encoder_cache_log")
    caplog.set_level(logging.DEBUG, logger="dejakv.encoder_cache")
    cache = VisualKVCache(max_entries=1)
    view = cache.view("an encoder", "a tenant")
    picture, another = (cache.compute_content_hash(raw) for raw in (b"a picture", b"another"))

    assert view.lookup(picture) is None
    view.store(picture, "image", np.ones((4, 8), np.float32))
    assert view.lookup(picture) is not None
    view.get_or_compute(another, "image", lambda: np.ones((4, 8), np.float32))
    view.clear()

    a, b = f"image {picture[:16]}", f"image {another[:16]}"
    assert [record.getMessage() for record in caplog.records] == [
        f"encoder output miss: {a}",
        f"encoder output stored: {a}, 128 bytes; now 1 outputs, 128 bytes",
        f"encoder output hit: {a}, used 1 times",
        f"encoder output miss: {b}",
        f"encoder output evicted (entries): {a}",
        f"encoder output stored: {b}, 128 bytes; now 1 outputs, 128 bytes",
        "encoder outputs cleared, 1 of them in memory",
    ]
    assert "a tenant" not in caplog.text
    names("log lines: miss, hit, stored, evicted, cleared")
    names.done()
