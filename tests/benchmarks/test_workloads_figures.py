"""The statistics and the words of the report, against what is known by hand."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from benchmarks.workloads.paired import paired
from benchmarks.workloads.words import verdict
from hypothesis import given
from hypothesis import strategies as st


def test_a_constant_factor_has_no_spread() -> None:
    found = paired([1.0, 2.0, 6.0], [2.0, 4.0, 12.0])
    assert found is not None
    assert found["ratio"] == 2.0
    assert found["ratio_interval"] == [2.0, 2.0]
    assert found["difference"] == 3.0


def test_the_interval_is_that_of_all_resamples() -> None:
    """Of three pairs there are 27 resamples, so the quantiles are known exactly."""
    base, other = [10.0, 20.0, 40.0], [5.0, 22.0, 20.0]
    every = [
        (sum(other[i] - base[i] for i in picks) / 3, sum(other[i] for i in picks) / sum(base[i] for i in picks))
        for picks in product(range(3), repeat=3)
    ]
    found = paired(base, other)
    assert found is not None
    for name, column in (("difference", 0), ("ratio", 1)):
        wanted = np.percentile([values[column] for values in every], [2.5, 97.5], method="inverted_cdf")
        assert found[f"{name}_interval"] == pytest.approx(list(wanted))


@given(st.lists(st.tuples(st.floats(1, 1e4), st.floats(1, 1e4)), min_size=2, max_size=40))
def test_the_interval_lies_within_the_extremes(pairs: list[tuple[float, float]]) -> None:
    found = paired([one for one, _ in pairs], [other for _, other in pairs])
    assert found is not None
    low, high = found["ratio_interval"]
    ratios = [other / one for one, other in pairs]
    assert min(ratios) * (1 - 1e-9) <= low <= high <= max(ratios) * (1 + 1e-9)


def test_one_request_and_no_time_have_no_interval() -> None:
    assert paired([1.0], [2.0]) is None
    assert paired([0.0, 0.0], [1.0, 2.0]) is None


def summary_of(ratio: tuple[float, float, float], **arm: Any) -> dict[str, Any]:
    values = {
        "ttft_against_prefix": {"ratio": ratio[0], "ratio_interval": list(ratio[1:])},
        "computed_of_prefix": 0.5,
        "first_token_equal": 30,
        "answers_equal": 30,
        "top1": None,
        "blended": {"requests": 4, "computed_share": 0.6},
        "reasons": {"words differ": 20, "min_gain": 6},
    }
    return {"samples": 30, "arms": {"default": {**values, **arm}}}


def test_what_is_faster_is_called_faster_only_beyond_the_interval() -> None:
    assert "**2.00 times as fast to the first token as prefix caching**" in verdict(summary_of((0.5, 0.4, 0.6)))
    assert "95%: 1.67 to 2.50" in verdict(summary_of((0.5, 0.4, 0.6)))
    assert "gained nothing over prefix caching that this run can show" in verdict(summary_of((0.5, 0.4, 1.0)))
    assert "lost to prefix caching" in verdict(summary_of((1.3, 1.1, 1.5)))


def test_a_bad_result_comes_with_its_reason() -> None:
    said = verdict(summary_of((1.3, 1.1, 1.5)))
    assert "Only 4 of 30 requests were blended" in said
    assert "60% of their rows" in said
    assert "(20 times): words differ" in said
    assert "requests were blended" not in verdict(summary_of((0.5, 0.4, 0.6)))


def test_few_are_only_few_where_they_are_less_than_half() -> None:
    said = verdict(summary_of((1.3, 1.1, 1.5), blended={"requests": 20, "computed_share": 0.6}, reasons={}))
    assert "20 of 30 requests were blended" in said
    assert "Only" not in said
    none = verdict(summary_of((1.3, 1.1, 1.5), blended={"requests": 0, "computed_share": None}))
    assert "Only 0 of 30 requests were blended." in none


def test_answers_that_were_not_compared_are_not_called_equal() -> None:
    said = verdict(summary_of((0.5, 0.4, 0.6), first_token_equal=None, answers_equal=None))
    assert "Answers were not compared." in said
    assert "changed" not in said


def test_what_was_changed_is_said() -> None:
    assert "It changed no answer." in verdict(summary_of((0.5, 0.4, 0.6)))
    said = verdict(summary_of((0.5, 0.4, 0.6), first_token_equal=27, answers_equal=20, top1=0.95))
    assert "the first token of 3 and the whole answer of 10 of 30" in said
    assert "at 5% of the places" in said
