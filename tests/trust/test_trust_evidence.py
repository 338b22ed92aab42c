import random
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from dejakv.trust import drift
from dejakv.trust.evidence import labels_needed, log_wealth

DELTAS = st.floats(0.001, 0.9)


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


@pytest.mark.parametrize(("delta", "none", "half"), [(0.01, 299, 1937), (0.02, 149, 960), (0.05, 59, 375)])
def test_little_more_than_the_least_possible(delta: float, none: int, half: int) -> None:
    """Wald's bound (1945) where no answer is wrong, and half as many as allowed."""
    ours, ours_half = labels_needed(delta, weight=1), labels_needed(delta, wrong_share=delta / 2, weight=1)
    assert ours is not None
    assert ours_half is not None
    assert none <= ours <= 1.2 * none
    assert half <= ours_half <= 1.35 * half


def audits_until_alarm(delta: float, rate: float, seed: int, most: int) -> int:
    chances = random.Random(seed)
    statistics = drift.begin()
    for number in range(1, most + 1):
        statistics = drift.audited(statistics, chances.random() < rate, delta)
        if drift.alarm(statistics):
            return number
    return most + 1


@pytest.mark.parametrize("delta", [0.01, 0.05])
def test_false_alarms_are_as_rare_as_stated(delta: float) -> None:
    """After n audits the mean statistic is n at most, so by Markov n / RUN_LENGTH of the streams have had an alarm at most."""
    audits, streams = 1500, 300
    alarms = sum(audits_until_alarm(delta, delta, seed, audits) <= audits for seed in range(streams))
    assert alarms <= binom.ppf(0.999, streams, audits / drift.RUN_LENGTH)


@pytest.mark.parametrize(("delta", "rate", "audits"), [(0.01, 0.2, 40), (0.05, 0.25, 80), (0.05, 1.0, 6)])
def test_a_rise_is_noticed(delta: float, rate: float, audits: int) -> None:
    assert median(audits_until_alarm(delta, rate, seed, 1000) for seed in range(100)) <= audits
