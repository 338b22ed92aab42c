"""The notation of KV layouts, and what follows from one."""

import pytest

from dejakv.errors import ConfigError
from dejakv.prototypes.lckv.layout import KVLayout


def test_sandwich_of_the_paper():
    layout = KVLayout.parse("0_" + "20_" * 20 + "21", 22)
    assert str(layout) == "0_" + "20_" * 20 + "21"
    assert layout.kv_layers == (0, 20, 21)
    assert (layout.bottom, layout.loop, layout.top) == (range(1), range(1, 21), range(21, 22))
    assert layout.task_layers == (20, 21)


def test_ordinary_model_has_no_loop():
    layout = KVLayout.parse("0_1_2", 3)
    assert (layout.bottom, list(layout.loop), list(layout.top)) == (range(3), [], [])
    assert layout.task_layers == ()


def test_layers_that_share_a_lower_layers_kv_are_not_condensed():
    assert not KVLayout.parse("0_0_2_2", 4).loop


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("full_attention", "cannot be read"),
        ("0_-1_2", "cannot be read"),
        ("0_1s_2", "cannot be read"),
        ("0_1", "names 2 layers"),
        ("0_1_3", "no KV of its own"),
        ("1_0_2", "no KV of its own"),
        ("1_2_2", "no KV of its own"),
    ],
)
def test_wrong_layouts_name_the_cause(text, cause):
    with pytest.raises(ConfigError, match=cause):
        KVLayout.parse(text, 3)
