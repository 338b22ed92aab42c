import math

import pytest

from dejakv.trust.arithmetic import labels_needed


@pytest.mark.parametrize(("delta", "none", "half"), [(0.01, 299, 1937), (0.02, 149, 960), (0.05, 59, 375)])
def test_little_more_than_the_least_possible(delta: float, none: int, half: int) -> None:
    """Wald's bound (1945) where no answer is wrong, and half as many as allowed."""
    ours, ours_half = labels_needed(delta, weight=1), labels_needed(delta, wrong_share=delta / 2, weight=1)
    assert ours is not None
    assert ours_half is not None
    assert none <= ours <= 1.2 * none
    assert half <= ours_half <= 1.35 * half


def test_at_the_bound_no_number_is_enough() -> None:
    assert labels_needed(0.05, wrong_share=0.05) is None


def test_more_confidence_takes_more_labels() -> None:
    assert (labels_needed(0.05, 0.99) or 0) > (labels_needed(0.05) or math.inf)
