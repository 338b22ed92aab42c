from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.config import SemanticCacheConfig
from dejakv.decide.choose import choose_plans, max_computed_share
from dejakv.decide.costs import ReuseCosts
from dejakv.decide.guards.base import GuardVerdict
from dejakv.decide.levels.base import Match
from dejakv.decide.method import PlanInputs
from dejakv.decide.methods import BlendPlan
from dejakv.decide.plan import DonorSearch, FullPlan, Plan, PrefixPlan, ReuseRequest
from dejakv.request import ReuseMode
from dejakv.store.base import PrefixHit, StateInfo


def meta(name: str, tokens: int = 100) -> StateInfo:
    return StateInfo(name, "p", "e", tuple(range(tokens)), "prompt", "chunk")


@dataclass(frozen=True)
class Planned:
    plans: tuple[Plan, ...]
    considered: tuple[Plan, ...]

    @property
    def plan(self) -> Plan:
        return self.plans[0]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.considered))}: {self.plan.name}"


def planned(
    *given: Any,
    min_gain: int = 0,
    min_gain_share: float = 0.0,
    share: float = 0.0,
    tail: int = 1,
    same: bool = False,
    costs: Any = None,
    prefill_unit: int = 1,
    **more: Any,
) -> Planned:
    """The plans, of which the last is full computation, whatever was found."""
    config = SemanticCacheConfig(
        min_gain=min_gain, min_gain_share=min_gain_share, blend_share=share or 1e-9, top_layer_tail=tail
    )
    made = Planned(*choose_plans(PlanInputs(*given, config, costs, prefill_unit), same=same, **more))
    assert made.plans[-1].method == "none"
    assert [plan.approximate for plan in made.plans[1:]] == [False] * (len(made.plans) - 1)
    return made


def best(*given: Any, **more: Any) -> Plan:
    return planned(*given, **more).plan


MATCH = Match("donor", "semantic_text", 0.9)
PREFIX = (PrefixHit("other", 70), meta("other"))


def test_a_miss_without_a_donor_says_so() -> None:
    modes: tuple[ReuseMode, ...] = ("off", "exact", "adopt", "blend", "top_layer")
    reasons = {mode: best(100, DonorSearch(), ReuseRequest(mode)).reason for mode in modes}
    assert {reasons.pop(mode) for mode in ("off", "exact")} == {"no stored prompt begins like this one"}
    assert set(reasons.values()) == {"no donor"}
    assert (
        best(100, DonorSearch(verdicts=(GuardVerdict("reject", "mine", "words"),)), ReuseRequest("adopt")).reason
        == "mine: words"
    )
    assert best(100, DonorSearch(prefix=PREFIX), ReuseRequest("exact")).reason == ""


def test_an_equal_prompt_is_exact_whatever_was_asked() -> None:
    found = DonorSearch(MATCH, (meta("donor"),), PREFIX)
    modes: tuple[ReuseMode, ...] = ("off", "exact", "adopt", "blend", "top_layer")
    for mode in modes:
        chosen = best(100, found, ReuseRequest(mode), same=True, min_gain=1000)
        assert (chosen.method, chosen.reused, chosen.approximate) == ("exact", 99, False)


@pytest.mark.parametrize(("min_gain", "method"), [(99, "adopt"), (100, "prefix")])
def test_an_adopted_prompt_saves_all_of_it(min_gain: int, method: str) -> None:
    """Of a short question behind a picture too: what an exact prefix holds of it is not left out."""
    found = best(100, DonorSearch(MATCH, (meta("donor"),), PREFIX), ReuseRequest("adopt"), min_gain=min_gain)
    assert found.method == method
    assert found.approximate == (method == "adopt")


def test_nothing_is_adopted_where_the_exact_prefix_holds_as_much() -> None:
    prefix = (replace(PREFIX[0], tokens=99), PREFIX[1])
    assert best(100, DonorSearch(MATCH, (meta("donor"),), prefix), ReuseRequest("adopt"), min_gain=1).method == "prefix"


def test_blend_must_beat_the_prefix_with_the_rows_it_computes() -> None:
    donors = (meta("donor"),)
    taken = best(100, DonorSearch(MATCH, donors), ReuseRequest("blend"), min_gain=80, share=0.2)
    refused = best(100, DonorSearch(MATCH, donors, PREFIX), ReuseRequest("blend"), min_gain=16, share=0.2)
    assert (taken.method, taken.reused) == ("blend", 80)
    assert (refused.method, "min_gain" in refused.reason) == ("prefix", True)


ROWS = ReuseCosts(row=1e-3)
MASKED = ReuseCosts(row=1e-3, pair=1e-5)


@pytest.mark.parametrize(
    ("costs", "copied", "held", "method"),
    [
        (ROWS, 90, 0, "blend"),
        (ROWS, 90, 95, "prefix"),  # what is left behind the prefix is less than what a blend computes
        (ROWS, 40, 0, "blend"),
        (MASKED, 40, 0, "blend"),
        (replace(MASKED, pair=1.0), 45, 0, "blend"),  # 55 rows, or 100, with half of 100 tokens each
        (replace(MASKED, pair=1.0, masked=2.0), 45, 0, "none"),
        (replace(ROWS, blend=9e-4), 90, 0, "blend"),
        (replace(ROWS, blend=1e-3), 90, 0, "none"),
        (replace(ROWS, blend=2e-4), 90, 75, "prefix"),
        (replace(ROWS, byte=1.0, token_bytes=1e-3), 90, 0, "none"),
    ],
)
def test_the_cheapest_plan_runs(costs: ReuseCosts, copied: int, held: int, method: str) -> None:
    found = DonorSearch(
        MATCH,
        (meta("donor"),),
        (PrefixHit("other", held), meta("other")) if held else None,
        copied=copied,
        short_runs=((0, copied),),
    )
    made = planned(100, found, ReuseRequest("blend"), costs=costs)
    assert made.plan.method == method
    assert made.plan.method == "blend" or made.plan.reason.startswith("costs: full ")


def test_the_reason_names_what_each_plan_would_take() -> None:
    costs = replace(ROWS, blend=4e-4)
    made = planned(
        100,
        DonorSearch(MATCH, (meta("donor"),), PREFIX, copied=80, short_runs=((0, 80),)),
        ReuseRequest("blend"),
        costs=costs,
    )
    assert made.plan.reason == (
        "costs: full 0.1 s, exact prefix 0.03 s, blend 0.06 s, blend behind the exact prefix 0.06 s: exact prefix"
    )


def test_a_plan_that_saves_too_little_or_computes_too_much_does_not_run_however_cheap() -> None:
    found = DonorSearch(MATCH, (meta("donor"),), copied=90, short_runs=((0, 90),))
    assert planned(100, found, ReuseRequest("blend"), costs=ROWS, min_gain=5).plan.max_row_share == 0.95, (
        "of the rows, found out later"
    )
    refused = planned(100, found, ReuseRequest("blend"), costs=ROWS, min_gain=91)
    assert (refused.plan.method, refused.plan.reason.split(":")[0]) == ("none", "min_gain")
    rows = planned(
        100, replace(found, copied=10, short_runs=((0, 10),)), ReuseRequest("blend"), costs=ROWS, min_gain_share=0.25
    )
    assert (rows.plan.method, rows.plan.reason.split(":")[0]) == ("none", "min_gain")
    assert str(rows).startswith("full 0.1 s, blend 0.09 s (min_gain: blend would save 10 tokens")


@pytest.mark.parametrize(("copied", "method"), [(77, "prefix"), (78, "blend")])
def test_a_blend_saves_a_share_of_what_its_exact_prefix_leaves(copied: int, method: str) -> None:
    """Of a prompt that only grows a few tokens stand elsewhere: they saved no time, and changed answers."""
    found = DonorSearch(MATCH, (meta("other"),), PREFIX, copied=copied, short_runs=((0, copied),))
    chosen = best(100, found, ReuseRequest("blend"), costs=ROWS, min_gain_share=0.25)
    assert chosen.method == method
    if method == "blend":
        assert chosen.max_row_share == 0.22
    assert best(100, found, ReuseRequest("blend"), costs=ROWS).method == "blend"


@pytest.mark.parametrize(("copied", "share"), [(0, 0.0), (20, 0.2)])
def test_an_adopted_prompt_needs_no_share(copied: int, share: float) -> None:
    prefix = (replace(PREFIX[0], tokens=95), PREFIX[1])
    found = DonorSearch(MATCH, (meta("donor"),), prefix, copied=copied)
    assert best(100, found, ReuseRequest("adopt"), min_gain=1, min_gain_share=share).method == "adopt"


constants = st.builds(
    ReuseCosts,
    row=st.floats(1e-6, 1e-1),
    pair=st.floats(0, 1e-3),
    byte=st.floats(0, 1e-6),
    blend=st.floats(0, 1e-2),
    whole=st.sampled_from([0.5, 1.0]),
    token_bytes=st.floats(0, 1e5),
)


@settings(deadline=None)
@given(constants, st.integers(2, 3000), st.data())
def test_no_plan_takes_longer_than_full_computation_by_its_own_figures(
    costs: ReuseCosts, tokens: int, data: Any
) -> None:
    held, copied = (data.draw(st.integers(0, tokens - 1)) for _ in range(2))
    prefix = (PrefixHit("other", held), meta("other", tokens)) if held else None
    found = DonorSearch(MATCH, (meta("donor", tokens),), prefix, copied=copied, short_runs=((0, copied),))
    made = planned(tokens, found, ReuseRequest("blend"), share=data.draw(st.floats(0, 1)), costs=costs)
    took = {way.name: way.seconds for way in made.considered}
    assert (took[made.plan.name] or 0.0) <= costs.full(tokens)


@settings(deadline=None)
@given(constants, st.integers(2, 3000), st.data())
def test_more_copied_text_never_makes_a_blend_dearer(costs: ReuseCosts, tokens: int, data: Any) -> None:
    less, more = sorted(data.draw(st.tuples(st.integers(0, tokens - 1), st.integers(0, tokens - 1))))
    share = data.draw(st.floats(0, 1))

    def seconds(copied: int) -> float:
        found = DonorSearch(MATCH, (meta("donor", tokens),), copied=copied, short_runs=((0, copied),))
        return planned(tokens, found, ReuseRequest("blend"), share=share, costs=costs).considered[-1].seconds or 0.0

    assert seconds(more) <= seconds(less)


@settings(deadline=None)
@given(constants, st.integers(2, 3000), st.data())
def test_a_blend_of_the_rows_that_may_be_computed_takes_no_longer_than_the_exact_plan(
    costs: ReuseCosts, tokens: int, data: Any
) -> None:
    held, gain = data.draw(st.integers(0, tokens - 1)), data.draw(st.integers(0, 64))
    exact = PrefixPlan((meta("other", tokens),), reused=held) if held else FullPlan()
    chosen = BlendPlan((meta("donor", tokens),), reused=tokens)
    rows = max_computed_share(tokens, chosen, exact, gain, costs) * tokens
    assert rows <= max(0, tokens - held - gain) * (1 + 1e-9)
    seconds = costs.prefix(held, tokens) if held else costs.full(tokens)
    assert rows == 0 or costs.blending(rows, tokens, tokens) <= seconds * (1 + 1e-9)


def test_the_top_layer_computes_its_tail_and_what_no_donor_holds() -> None:
    found = DonorSearch(MATCH, (meta("donor"), meta("second")), short_runs=((0, 60),))
    chosen = best(100, found, ReuseRequest("top_layer"), tail=32, min_gain_share=0.25)
    assert (chosen.method, chosen.reused, chosen.approximate, chosen.name) == ("top_layer", 60, True, "top layer")
    assert len(chosen.donors) == 2
    known = best(100, DonorSearch(MATCH, (meta("donor"),), short_runs=((0, 100),)), ReuseRequest("top_layer"), tail=32)
    assert known.reused == 68


def test_the_top_layer_is_not_taken_for_a_prompt_that_is_mostly_new() -> None:
    donor_search = DonorSearch(MATCH, (meta("donor"),), short_runs=((0, 10),))
    found = best(100, donor_search, ReuseRequest("top_layer"), tail=32, min_gain_share=0.25)
    assert found.method == "none"
    assert "top_layer would save 10 tokens" in found.reason


def test_the_top_layer_must_be_cheaper_than_the_exact_prefix() -> None:
    costs = ReuseCosts(row=1.0)
    found = DonorSearch(MATCH, (meta("donor"),), PREFIX, short_runs=((0, 100),))
    assert best(100, found, ReuseRequest("top_layer"), tail=32, costs=costs).method == "prefix"
    assert best(100, found, ReuseRequest("top_layer"), tail=10, costs=costs).method == "top_layer"


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize(("seconds", "method"), [(0.0, "exact"), (0.05, "exact"), (0.2, "none")])
def test_state_in_a_bucket_is_read_where_that_beats_computing_and_until_then(
    same: bool, seconds: float, method: str
) -> None:
    donor = meta("donor")
    found = DonorSearch(MATCH, (donor,)) if same else DonorSearch(prefix=(PrefixHit("donor", 99), donor))
    chosen = best(
        100, found, ReuseRequest(), costs=ReuseCosts(row=1e-3), same=same, read_seconds=lambda donor, held: seconds
    )
    assert chosen.method == (method if same or method == "none" else "prefix")
    if chosen.donors:  # copies that are here, too: they may leave before they are read
        assert (chosen.max_read_seconds, chosen.seconds) == (pytest.approx(0.099), pytest.approx(0.001 + seconds))
    else:
        assert chosen.max_read_seconds is None


def test_a_blend_of_donors_in_a_bucket_is_made_where_it_beats_the_exact_prefix_that_is_here() -> None:
    found = DonorSearch(MATCH, (meta("donor"),), PREFIX, short_runs=((0, 90),))

    def away(donor: str, _: object) -> float:
        return 0.015 if donor == "donor" else 0.0

    for row, method in ((1e-3, "blend"), (1e-4, "prefix")):
        chosen = best(100, found, ReuseRequest("blend"), costs=ReuseCosts(row=row), read_seconds=away)
        assert chosen.method == method
        assert chosen.max_read_seconds == pytest.approx(0.03 - 0.01 if method == "blend" else 0.01 - 0.003)
