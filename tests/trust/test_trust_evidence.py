import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from dejakv.trust.evidence import BETS, log_wealth

DELTAS = st.floats(0.001, 0.9)


def labels_needed(delta: float) -> int:
    count = np.arange(1, 4000)
    return int(count[np.argmax(log_wealth(count, 0, delta) >= np.log(20))])


@pytest.mark.parametrize(("delta", "least"), [(0.01, 299), (0.02, 149), (0.05, 59)])
def test_without_a_wrong_answer_little_more_than_the_least_possible_is_needed(delta: float, least: int) -> None:
    assert least == int(np.ceil(np.log(0.05) / np.log(1 - delta)))
    assert least <= labels_needed(delta) <= 1.2 * least


def test_bets_share_the_wealth_and_the_largest_is_everything() -> None:
    assert sum(part for _, part in BETS) == pytest.approx(1)
    assert max(fraction for fraction, _ in BETS) == 1


@given(DELTAS, st.integers(1, 60))
def test_at_the_bound_wealth_stays_at_one_on_average(delta: float, labels: int) -> None:
    wrong = np.arange(labels + 1)
    mean = np.sum(binom.pmf(wrong, labels, delta) * np.exp(log_wealth(labels, wrong, delta)))
    assert mean == pytest.approx(1, rel=1e-6)


@given(st.floats(0.01, 0.5), st.floats(0.05, 0.95), st.floats(0, 1), st.floats(0.01, 1))
def test_so_it_does_where_shares_differ_within_a_rule(delta: float, part: float, split: float, audit: float) -> None:
    """Two kinds of hits: `part` of them come with probability `audit` of a label, the others with 1. Together delta are wrong."""
    first = min(1.0, split * delta / part)
    second = (delta - part * first) / (1 - part)
    if not 0 <= second <= 1:
        return
    chance = part * audit / (part * audit + 1 - part)  # that a labelled hit is of the first kind
    wealth = np.exp(
        [
            [log_wealth(1, 0, delta), log_wealth(1, 1, delta)],
            [
                log_wealth(0, 0, delta, light_labels=1, light_wrong=0, weight=audit),
                log_wealth(0, 0, delta, light_labels=1, light_wrong=1, weight=audit),
            ],
        ]
    )
    mean = chance * ((1 - first) * wealth[0, 0] + first * wealth[0, 1])
    mean += (1 - chance) * ((1 - second) * wealth[1, 0] + second * wealth[1, 1])
    assert mean == pytest.approx(1, rel=1e-6)


@given(DELTAS, st.integers(0, 300), st.integers(0, 300), st.floats(0.01, 1))
def test_a_wrong_label_never_helps_and_a_larger_bound_never_hurts(
    delta: float, labels: int, wrong: int, weight: float
) -> None:
    wrong = min(labels, wrong)
    known = log_wealth(labels, wrong, delta)
    assert log_wealth(labels + 1, wrong + 1, delta) <= known + 1e-9
    assert log_wealth(labels + 1, wrong, delta) >= known - 1e-9
    assert log_wealth(labels, wrong, min(0.99, 1.5 * delta)) >= known - 1e-9
    light = log_wealth(labels, wrong, delta, light_labels=1, light_wrong=1, weight=weight)
    assert light >= log_wealth(labels + 1, wrong + 1, delta) - 1e-9
