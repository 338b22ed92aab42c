"""Rows copied as slices and one by one land in the same places."""

import numpy as np
import pytest
import torch

from dejakv.blend.slices import GAP, SLICED, contiguous, copy_rows, ranges_of, split_runs


def test_runs_of_places_and_what_stands_apart() -> None:
    places = np.array([*range(10, 10 + SLICED), 3, 5, *range(100, 100 + SLICED - 1)])
    assert contiguous(places) == [
        (0, SLICED),
        (SLICED, SLICED + 1),
        (SLICED + 1, SLICED + 2),
        (SLICED + 2, len(places)),
    ]
    runs, apart = split_runs(places)
    assert runs == [(0, SLICED)]
    assert apart.tolist() == list(range(SLICED, len(places)))


def test_a_group_ends_a_run() -> None:
    places = np.arange(2 * SLICED)
    assert split_runs(places, places // SLICED)[0] == [(0, SLICED), (SLICED, 2 * SLICED)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_copied_in_their_order_and_nothing_else_is(dtype: torch.dtype) -> None:
    state = torch.randn(2, 3, 2, 150, 4).to(dtype)
    into = torch.zeros(2, 3, 2, 200, 4, dtype=dtype)
    places = np.array([*range(20, 70), 9, 8, 7, *range(100, 140)])
    rows = np.array([*range(60, 110), 1, 150, 3, *range(10, 50)])
    copy_rows(state, places, into, rows)
    expected = torch.zeros_like(into)
    expected[:, :, :, rows] = state[:, :, :, places]
    assert torch.equal(into, expected)


def test_ranges_hold_all_places_and_nothing_far_from_them() -> None:
    assert ranges_of(np.array([5, 3, 4, 4, 3 + GAP, 200])) == [(3, 4 + GAP), (200, 201)]
    assert ranges_of(np.array([3, 4 + GAP])) == [(3, 4), (4 + GAP, 5 + GAP)]
    assert ranges_of(np.array([], dtype=np.int64)) == []
