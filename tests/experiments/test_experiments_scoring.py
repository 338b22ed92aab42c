import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejakv.experiments.scoring import percentile, same, wilson


def test_wilson_known_values() -> None:
    low, high = wilson(8, 10)
    assert (round(low, 3), round(high, 3)) == (0.490, 0.943)
    assert wilson(0, 0) == (0.0, 1.0)


@given(st.integers(0, 500), st.integers(1, 500))
def test_wilson_holds_the_rate(successes: int, trials: int) -> None:
    successes = min(successes, trials)
    low, high = wilson(successes, trials)
    assert 0 <= low <= successes / trials + 1e-12
    assert successes / trials - 1e-12 <= high <= 1


def test_percentile() -> None:
    assert percentile([4, 1, 3, 2], 0.5) == 2.5
    assert percentile([], 0.5) == 0.0
    assert percentile([7], 0.95) == 7


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [("Yes.", "yes", True), (" Red  ", "red", True), ("red", "blue", False), ("", None, False)],
)
def test_same(one: str, other: str | None, equal: bool) -> None:
    assert same(one, other) is equal
