import math

import pytest

from dejakv.trust.arithmetic import labels_needed, least_possible


@pytest.mark.parametrize(("delta", "none", "half"), [(0.01, 299, 1937), (0.02, 149, 960), (0.05, 59, 375)])
def test_the_least_possible_and_ours(delta: float, none: int, half: int) -> None:
    assert math.ceil(least_possible(delta)) == none
    assert round(least_possible(delta, wrong_share=delta / 2)) == half
    ours, ours_half = labels_needed(delta, weight=1), labels_needed(delta, wrong_share=delta / 2, weight=1)
    assert ours is not None
    assert ours_half is not None
    assert none <= ours <= 1.2 * none
    assert half <= ours_half <= 1.35 * half


def test_at_the_bound_no_number_is_enough() -> None:
    assert labels_needed(0.05, wrong_share=0.05) is None
    assert least_possible(0.05, wrong_share=0.05) == math.inf


def test_more_confidence_takes_more_labels() -> None:
    assert (labels_needed(0.05, 0.99) or 0) > (labels_needed(0.05) or math.inf)
