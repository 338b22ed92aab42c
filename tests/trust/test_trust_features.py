import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejakv.decide.levels.base import Match
from dejakv.decide.methods import BlendPlan
from dejakv.decide.plan import DonorSearch
from dejakv.store.base import StateInfo
from dejakv.trust.features import LATE_BLEND, LATE_CUTOFFS, certainty, features_of, orders, risk_of
from dejakv.trust.rules import LONG_TRY, PILOT, band_of, cutoffs_of

SHARE = st.floats(0, 1)


def test_features_of_copied_text() -> None:
    donors = tuple(StateInfo(str(made), "", "e", (1, 2), "", "", generation=made) for made in (0, 2))
    plan = BlendPlan(donors, Match("0", "copied", 0.75), reused=60, prefix_tokens=10)
    known = features_of(plan, DonorSearch(plan.match, donors, copied=50, runs=((70, 20), (20, 30))), 100)
    wanted = {"share_rows": 0.4, "score": 0.75, "generation": 2, "seams": 2, "longest_new": 0.2}
    assert known == pytest.approx(wanted)


@given(
    st.dictionaries(
        st.sampled_from(["share_rows", "seams", "longest_new", "generation", "score", "margin"]), st.floats()
    )
)
def test_a_risk_is_from_0_to_1_whatever_is_known(features: dict[str, float]) -> None:
    assert 0 <= risk_of("blend", features) <= 1
    assert 0 <= risk_of("adopt", features) <= 1
    assert 0 <= risk_of(LATE_BLEND, {"first_margin": features.get("margin", 0.0)}) <= 1


@given(st.sampled_from(["share_rows", "seams", "longest_new", "generation"]), SHARE, SHARE, SHARE)
def test_more_of_what_is_new_is_no_less_risk(name: str, low: float, high: float, rest: float) -> None:
    known = {"share_rows": rest, "seams": rest, "longest_new": rest, "generation": rest}
    low, high = sorted((low, high))
    assert risk_of("blend", {**known, name: low}) <= risk_of("blend", {**known, name: high}) + 1e-12


@given(SHARE, SHARE)
def test_a_better_score_is_no_more_risk(low: float, high: float) -> None:
    low, high = sorted((low, high))
    assert risk_of("adopt", {"score": high}) <= risk_of("adopt", {"score": low})


@given(st.floats(0, 100), st.floats(0, 100))
def test_a_wider_margin_of_the_first_token_is_no_more_risk(low: float, high: float) -> None:
    low, high = sorted((low, high))
    assert risk_of(LATE_BLEND, {"first_margin": high}) <= risk_of(LATE_BLEND, {"first_margin": low})
    assert risk_of(LATE_BLEND, {}) == 1


@given(st.lists(SHARE, min_size=PILOT, max_size=PILOT), SHARE)
def test_cutoffs_ascend_to_one_and_each_risk_has_its_band(pilot: list[float], risk: float) -> None:
    cutoffs = cutoffs_of(pilot)
    assert list(cutoffs) == sorted(set(cutoffs))
    assert cutoffs[-1] == 1
    assert min(pilot) <= cutoffs[0]  # no rule is without hits
    band = band_of(risk, cutoffs)
    assert risk <= cutoffs[band]
    assert band == 0 or risk > cutoffs[band - 1]


@given(st.floats(0, 10), st.floats(0, 1e6))
def test_a_rule_serves_what_takes_less_than_it_allows(margin: float, time: float) -> None:
    risk = risk_of(LATE_BLEND, {"first_margin": margin})
    last = len(LATE_CUTOFFS) - 1
    assert band_of(risk, LATE_CUTOFFS, time) == (
        last if time >= LONG_TRY else sum(margin < m for m in (2, 1, 0.5, 0.25))
    )


def test_margin_of_a_distribution_in_which_tokens_may_be_impossible() -> None:
    logs = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    assert certainty(logs) == pytest.approx({"first_margin": math.log(2)}, abs=1e-6)
    assert certainty(np.array([0.0, -np.inf, -np.inf], np.float32)) == {"first_margin": math.inf}


@pytest.mark.parametrize(
    ("differs", "ordered"), [("first", True), ("answer", True), ("a.b:c", True), ("kl:0.05", False)]
)
def test_it_orders_tokens_and_texts_and_no_distributions(differs: str, ordered: bool) -> None:
    assert orders(differs) is ordered
