"""Which rows take the top layer's state of which donors."""

import numpy as np
import pytest

from dejakv.blend.settings import too_dear
from dejakv.blend.token_map import Donors
from dejakv.blend.top_layer import TopLayerConfig, computed_rows, take_rows
from dejakv.errors import ConfigError

WORDS = tuple(range(100, 160))


def no_vectors(ids):
    return np.zeros((len(ids), 4), np.float32)


def test_rows_come_from_as_many_donors_as_hold_them():
    donors = Donors.of((1, *WORDS[:20]), (2, *WORDS[30:50]))
    target = (3, *WORDS[30:50], *WORDS[:20], 4, 5)
    taken = take_rows(target, donors, "map", no_vectors, tail=2)
    first, second = taken[1:21], taken[21:41]
    assert first.tolist() == list(range(22, 42))
    assert second.tolist() == list(range(1, 21))
    assert taken[[0, 41, 42]].tolist() == [-1, -1, -1]


def test_an_exact_prefix_is_taken_from_the_prompt_that_begins_with_it():
    """Elsewhere the same words were computed behind other text."""
    elsewhere, own = (9, *WORDS), (*WORDS[:10], 7, 8)
    taken = take_rows((*WORDS[:10], 5, 6, 5, 6), Donors.of(elsewhere, own), "map", no_vectors, tail=2)
    assert taken[:10].tolist() == list(range(61, 71))


def test_the_end_is_computed_and_an_equal_prompt_computes_its_last_row():
    donors = Donors.of(WORDS)
    assert computed_rows(take_rows((*WORDS, 1), donors, "map", no_vectors, tail=5)).tolist() == [56, 57, 58, 59, 60]
    assert computed_rows(take_rows(WORDS, donors, "map", no_vectors, tail=5)).tolist() == [59]


def test_what_is_not_worth_it_says_why():
    config = TopLayerConfig(max_computed=0.4)
    assert too_dear(config, 0.3, 0.3) == ""
    assert "no more than 40% pay" in too_dear(config, 0.5, 0.5)
    assert "too little is alike: 90%" in too_dear(config, 0.9, 0.9)


@pytest.mark.parametrize("wrong", [{"tail": 0}, {"max_share": 2.0}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TopLayerConfig(**wrong)
