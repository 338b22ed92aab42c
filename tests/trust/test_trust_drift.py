import random
from statistics import median

import pytest
from scipy.stats import binom

from dejakv.trust import drift


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


def test_far_below_the_bound_nothing_alarms() -> None:
    assert all(audits_until_alarm(0.05, 0.01, seed, 2000) > 2000 for seed in range(100))


@pytest.mark.parametrize(("delta", "rate", "audits"), [(0.01, 0.2, 40), (0.05, 0.25, 80), (0.05, 1.0, 6)])
def test_a_rise_is_noticed(delta: float, rate: float, audits: int) -> None:
    assert median(audits_until_alarm(delta, rate, seed, 1000) for seed in range(100)) <= audits


@pytest.mark.parametrize("delta", [1e-6, 0.01, 0.6, 0.999])
def test_what_is_looked_for_lies_above_the_bound(delta: float) -> None:
    assert drift.audited(drift.begin(), True, delta) > drift.audited(drift.begin(), False, delta)
    assert all(value < 1 for value in drift.audited(drift.begin(), False, delta))
