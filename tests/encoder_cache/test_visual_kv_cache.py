"""The public face: what users of the prototype know, the further figures, DP mode, and every bad input."""

import numpy as np
import pytest

from dejakv.encoder_cache import (
    VisualKVCache,
    recommend_dp_mode,
)
from dejakv.errors import ConfigError, InputError


def picture(rows=4, value=1.0):
    return np.full((rows, 8), value, np.float32)


@pytest.mark.parametrize(
    "settings",
    [{"max_entries": 0}, {"max_entries": -1}, {"max_vram_bytes": 0}, {"max_vram_bytes": -5}, {"policy": "random"}],
)
def test_wrong_settings(settings):
    with pytest.raises(ConfigError):
        VisualKVCache(**settings)


@pytest.mark.parametrize("raw", [b"", bytearray(), memoryview(b""), "text", None])
def test_nothing_to_hash(raw):
    with pytest.raises(InputError):
        VisualKVCache().compute_content_hash(raw)


@pytest.mark.parametrize("modality", ["smell", "", "IMAGE", "images"])
def test_unknown_modality(modality):
    cache = VisualKVCache()
    for act in (
        lambda: cache.lookup("h", modality),
        lambda: cache.store("h", modality, picture()),
        lambda: cache.get_or_compute("h", modality, picture),
    ):
        with pytest.raises(InputError, match="audio, image, video"):
            act()
    assert cache.stats().misses == 0


def test_an_empty_content_hash():
    cache = VisualKVCache()
    with pytest.raises(InputError, match="content hash"):
        cache.store("", "image", picture())
    with pytest.raises(InputError, match="content hash"):
        cache.get_or_compute("", "image", picture)


@pytest.mark.parametrize(
    "embedding",
    [np.ones((0, 8)), np.ones((3, 0)), np.ones(8), np.ones((1, 1, 1, 8)), [[1.0]], None, 3.0],
    ids=["no tokens", "no width", "1-D", "4-D", "list", "None", "number"],
)
def test_what_is_no_embedding(embedding):
    cache = VisualKVCache()
    with pytest.raises(InputError):
        cache.store("h", "image", embedding)
    with pytest.raises(InputError):
        cache.get_or_compute("h", "image", lambda: embedding)
    assert cache.stats().entries == 0
    assert cache.stats().encoder_failures == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_an_error_and_not_kept(bad):
    cache = VisualKVCache()
    embedding = picture()
    embedding[2, 3] = bad
    with pytest.raises(InputError, match="NaN or infinite"):
        cache.store("h", "image", embedding)
    with pytest.raises(InputError, match="NaN or infinite"):
        cache.get_or_compute("h", "image", lambda: embedding)
    assert cache.lookup("h") is None
    lenient = VisualKVCache(check_finite=False)
    assert lenient.store("h", "image", embedding) is not None


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_impossible_encoder_seconds(seconds):
    with pytest.raises(InputError, match="encoder_seconds"):
        VisualKVCache().store("h", "image", picture(), encoder_seconds=seconds)


@pytest.mark.parametrize(
    ("count", "resolution", "depth", "yes"),
    [
        (10, (256, 256), 27, False),
        (10, (256, 256), 60, False),  # the first rule goes before the others
        (9, (256, 256), 27, True),
        (10, (257, 256), 27, True),
        (10, (256, 257), 27, True),
        (2, (64, 64), 1, True),
        (1, (512, 512), 27, True),
        (1, (511, 512), 27, False),
        (1, (1024, 256), 27, False),
        (1, (64, 64), 45, True),
        (1, (64, 64), 44, False),
        (0, (64, 64), 27, False),
    ],
)
def test_rules_in_their_order(count, resolution, depth, yes):
    cache = VisualKVCache()
    assert cache.get_dp_mode_recommendation(count, resolution, depth) is yes
    assert cache.get_cache_stats()["dp_mode_recommendations"] == int(yes)


def test_the_value_names_the_flag_and_the_reason():
    yes = VisualKVCache().dp_mode(4, (336, 336))
    assert yes.flag == ("--mm-encoder-tp-mode", "data")
    assert "4 images" in yes.reason
    assert str(yes).startswith("--mm-encoder-tp-mode data: ")
    no = recommend_dp_mode(12, (128, 128))
    assert no.flag == ()
    assert "12 images of 128x128" in no.reason


@pytest.mark.parametrize(
    "arguments", [(-1,), (1, (0, 5)), (1, (-5, 5)), (1, (5,)), (1, (5, 5), 0)], ids=lambda value: str(value)
)
def test_impossible_batches(arguments):
    cache = VisualKVCache()
    with pytest.raises(InputError):
        cache.get_dp_mode_recommendation(*arguments)
    assert cache.stats().dp_mode_recommendations == 0


def test_storing_an_existing_key_replaces_it_and_its_bytes():
    cache = VisualKVCache()
    cache.store("a", "image", picture(4))
    cache.lookup("a")
    cache.store("a", "image", picture(8, value=2))
    stats = cache.stats()
    assert (stats.entries, stats.bytes) == (1, 8 * 8 * 4)
    assert stats.evictions == {"replaced": 1}
    block = cache.lookup("a")
    assert block.embedding[0, 0] == 2
    assert block.access_count == 2
