import pytest

from dejakv.encoder_cache import VisualKVCache, recommend_dp_mode
from dejakv.errors import InputError


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


def test_defaults_are_a_large_picture():
    assert VisualKVCache().get_dp_mode_recommendation(1)


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
