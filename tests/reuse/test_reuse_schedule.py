"""Schedules: shapes, means, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejakv.errors import ConfigError
from dejakv.reuse.schedule import SCHEDULES, Schedule, constant, exponential, linear, parse, with_mean


@given(
    name=st.sampled_from(SCHEDULES), layers=st.integers(1, 40), complete=st.integers(0, 3), mean=st.floats(0, 1), spread=st.floats(1, 8)
)  # fmt: skip
def test_a_schedule_has_the_mean_asked_for_and_never_grows(name, layers, complete, mean, spread):
    complete = min(complete, layers)
    made = with_mean(name, layers, mean, complete=complete, spread=spread)
    assert len(made.shares) == layers
    assert all(later <= earlier + 1e-9 for earlier, later in zip(made.shares, made.shares[1:], strict=False))
    assert made.shares[:complete] == (1.0,) * complete
    # A mean below what the complete layers take, or one that decay cannot reach below a share of 1, is approached only.
    reachable = max(mean, complete / layers)
    top = constant(layers, 1.0, complete=complete).mean if name == "constant" else made.mean
    assert made.mean == pytest.approx(min(reachable, top), abs=1e-3)


def test_shapes():
    assert constant(4, 0.2, complete=1).shares == (1.0, 0.2, 0.2, 0.2)
    assert linear(5, 0.5, 0.1, complete=1).shares == pytest.approx((1.0, 0.5, 0.3667, 0.2333, 0.1), abs=1e-3)
    falling = exponential(4, 0.8, 0.1).shares
    assert falling == pytest.approx((0.8, 0.4, 0.2, 0.1))
    assert parse("1,0.3", 4).shares == (1.0, 0.3, 0.3, 0.3)


def test_at_least_the_last_row_is_computed():
    assert constant(2, 0.0).rows(0, 500) == 1
    assert constant(2, 0.5).rows(1, 9) == 4
    assert Schedule((1.0,)).rows(0, 7) == 7


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Schedule(()), "one share a layer"),
        (lambda: Schedule((0.5, 0.6)), "grows"),
        (lambda: Schedule((1.5,)), "between 0 and 1"),
        (lambda: with_mean("steep", 4, 0.2), "choose one of"),
        (lambda: parse("1,x", 4), "separated by commas"),
        (lambda: parse("1,1,1", 2), "names 3 layers"),
        (lambda: constant(2, 0.1, complete=3), "complete layers"),
    ],
)
def test_bad_schedules_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
