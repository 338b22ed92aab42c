"""Winnowing: what is kept of a text, and that equal runs keep the same places."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.decide.copied.fingerprints import GUARANTEED, IN_A_ROW, WINDOW, K, fingerprints


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 1 << 32))
def test_a_run_of_32_has_a_fingerprint_at_the_same_place_in_both_texts(one: int, other: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    run = rng.integers(0, 50_000, GUARANTEED)
    kept: list[set[tuple[int, int]]] = []
    for before in (one, other):
        text = np.concatenate([rng.integers(0, 3, before), run, rng.integers(0, 3, 50)])
        found = fingerprints(text)
        inside = (found.positions >= before) & (found.positions + K <= before + GUARANTEED)
        places = (found.positions[inside] - before).tolist()
        kept.append(set(zip(found.keys[inside].tolist(), places, strict=True)))
    assert kept[0] & kept[1]


def test_about_one_place_in_eight_is_kept_and_none_are_far_apart() -> None:
    found = fingerprints(np.random.default_rng(0).integers(0, 49_152, 200_000))
    assert len(found) == pytest.approx(200_000 / 8, rel=0.03)
    assert np.diff(found.positions).max() <= WINDOW
    assert np.diff(found.positions).min() >= 1


@pytest.mark.parametrize("period", [1, 2, 7, 14])
def test_text_that_repeats_itself_keeps_few_places(period: int) -> None:
    found = fingerprints(np.tile(np.arange(period), 10_000))
    assert len(found) == IN_A_ROW


def test_what_repeats_at_a_distance_is_kept() -> None:
    passage = np.random.default_rng(0).integers(0, 49_152, 100)
    once = len(fingerprints(passage))
    assert len(fingerprints(np.tile(passage, 30))) >= 30 * once


@pytest.mark.parametrize("length", [0, 1, K, GUARANTEED - 1])
def test_less_than_a_run_has_no_fingerprint(length: int) -> None:
    assert len(fingerprints(np.arange(length))) == 0


def test_one_run_has_one() -> None:
    assert len(fingerprints(np.arange(GUARANTEED))) == 1
