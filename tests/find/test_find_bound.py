"""Blends that must be tried before it is known whether they are served: which are, and what is learned of the others."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.documents import BOUNDED

from dejakv.decide.bound import ErrorBound, setting_of
from dejakv.decide.levels.base import Match, Query
from dejakv.decide.methods import BlendPlan
from dejakv.decide.plan import Decision, DonorSearch, FullPlan, ReuseRequest
from dejakv.engines.base import Prepared
from dejakv.request import Request
from dejakv.store.base import StateInfo
from dejakv.trust.features import LATE_BLEND, features_of, risk_of
from dejakv.trust.gate import TrustGate
from dejakv.trust.settings import TrustSettings

ASK = ReuseRequest("blend", tells_first_token=True)
PREPARED = Prepared(Request("r", "prompt", "prompt"), tuple(range(100)), (), epoch="e")
ENTRY = StateInfo("k", "default", "e", tuple(range(100)), "prompt", "prompt")
DELTA = 0.1


def hit(gate: TrustGate, share: float | None, margin: float, wrong: bool) -> tuple[Any, Any]:
    """One would-be hit whose blend takes this share of full computation's time: the plan that runs first, and its draw, None if there
    was none. Its label is told at once."""
    blend = BlendPlan(reused=50, seconds=share)
    full = FullPlan(seconds=1.0 if share is not None else None)
    query = Query(PREPARED.request, "", dict)
    decision = Decision(ENTRY, ASK, (blend, full), DonorSearch(copied=50), query, {}, considered=(full, blend))
    decision = ErrorBound(gate, BOUNDED).review_decision(PREPARED, decision)
    trial = decision.trial
    if trial is not None and trial.draw is None:
        other = np.log(np.array([1.0, np.exp(-margin)]) / (1 + np.exp(-margin)))
        assert decision.plan.accept is not None
        decision.plan.accept(other.astype(np.float32))
    draw = None
    if trial is not None:
        draw = trial.draw
        assert draw is not None
        if draw.labelled:
            gate.learn(draw, wrong, {"first_margin": margin})
    return decision, draw


def streamed(seed: int, cheap_are_wrong: float) -> tuple[int, int]:
    """How many hits were served, and how many of them wrongly. Of the unsure hits half are wrong. Of the sure ones so many of those
    are whose blends take little, which shows in nothing that orders hits."""
    chance = random.Random(seed)
    gate = TrustGate(TrustSettings(error_bound=DELTA, audit_share=0.1), random=chance.random)
    served = bad = 0
    for _ in range(2000):
        margin, share = chance.uniform(0, 5), chance.uniform(0.05, 0.8)
        wrong = chance.random() < (0.5 if margin < 2 else cheap_are_wrong if share < 0.2 else 0.0)
        _, draw = hit(gate, share, margin, wrong)
        if draw is not None and draw.served:
            served, bad = served + 1, bad + wrong
    return served, bad


@pytest.mark.slow
def test_what_blends_take_cannot_make_the_bound_wrong() -> None:
    """A rule that is right for all blends is not used to serve those alone that are worth trying."""
    found = [streamed(seed, 0.3) for seed in range(2)]
    assert sum(bad for _, bad in found) <= DELTA * sum(served for served, _ in found)
    assert streamed(0, 0.0)[0] > 100


@pytest.fixture
def opened() -> TrustGate:
    """A gate whose strictest rules are open: half of the hits are unsure, and wrong half of the time."""
    chance = random.Random(4)
    gate = TrustGate(TrustSettings(error_bound=0.1, audit_share=0.5), random=chance.random)
    while not 0 < gate.report().rules < 4:
        margin = chance.choice([chance.uniform(0, 0.5), chance.uniform(1, 4)])
        hit(gate, 0.1, margin, margin < 0.5 and chance.random() < 0.5)
    return gate


def test_a_blend_that_takes_more_than_open_rules_spend_is_not_tried_but_learned_from(opened: TrustGate) -> None:
    explored = opened.report().explored
    planned, draw = hit(opened, 0.9, 4.0, wrong=False)
    assert (planned.plan.method, draw.served, draw.late, draw.labelled) == ("none", False, True, True)
    assert "90% of the exact plan's time is more than open rules spend" in planned.plan.reason
    assert opened.report().explored == explored + 1
    planned, draw = hit(opened, 0.1, 4.0, wrong=False)
    assert (planned.plan.method, draw.served, draw.late) == ("blend", True, False)


def test_without_costs_every_blend_is_tried_while_a_rule_is_open(opened: TrustGate) -> None:
    planned, draw = hit(opened, None, 4.0, wrong=False)
    assert (planned.plan.method, draw.served) == ("blend", True)


def test_a_label_of_an_untried_blend_counts_in_no_rule_that_would_not_serve_it(opened: TrustGate) -> None:
    """However sure it was."""
    before = opened.report().classes[0].rules
    hit(opened, 0.9, 4.0, wrong=False)
    after = opened.report().classes[0].rules
    assert [new.labels - old.labels for new, old in zip(after, before, strict=True)] == [0] * (len(after) - 1) + [1]


def test_a_rule_that_opens_meanwhile_leaves_the_draw_unlabelled(opened: TrustGate) -> None:
    setting = setting_of("blend", replace(BOUNDED))
    draw = opened.draw(opened.class_of("default", "e", LATE_BLEND, setting), {"time_share": 0.1}, late=True)
    assert (draw.served, draw.labelled, draw.reason) == (False, False, "a rule has opened meanwhile")


def test_a_plan_is_drawn_for_under_its_own_class_and_features() -> None:
    gate = TrustGate(TrustSettings(error_bound=DELTA))
    donor = StateInfo("d", "tenant", "e", tuple(range(80)), "p", "p", generation=1)
    prepared = replace(PREPARED, request=replace(PREPARED.request, partition="tenant"))
    plan, full = BlendPlan((donor,), Match("d", "copied", 0.6), reused=70, prefix_tokens=5), FullPlan()
    found = DonorSearch(plan.match, plan.donors, copied=60, runs=((0, 60),))
    query = Query(prepared.request, "", dict)
    decision = Decision(ENTRY, ReuseRequest("blend"), (plan, full), found, query, {}, considered=(full, plan))
    trial = ErrorBound(gate, BOUNDED).review_decision(prepared, decision).trial
    assert trial is not None
    draw = trial.draw
    assert draw is not None
    assert not draw.served
    assert draw.cls == ("e", "blend", setting_of("blend", BOUNDED), gate.settings.group_of("tenant"))
    assert draw.risk == risk_of("blend", features_of(plan, found, 100))
    assert gate.report("tenant").classes[0].counts.refused == 1
