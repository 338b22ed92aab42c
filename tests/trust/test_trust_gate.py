import random

import pytest
from tests.trust.conftest import gate_of, hit, opened, pilot, teach

from dejakv.errors import InputError
from dejakv.trust.draw import MAX_AUDITS, MAX_PENDING, HitDraw
from dejakv.trust.features import LATE_BLEND
from dejakv.trust.gate import TrustGate
from dejakv.trust.rules import PILOT
from dejakv.trust.settings import TrustSettings


def test_cold_start_serves_nothing_and_the_first_hits_choose_the_rules_unlabelled() -> None:
    gate = gate_of()
    draws = [hit(gate) for _ in range(PILOT + 1)]
    assert not any(draw.served for draw in draws)
    assert [draw.labelled for draw in draws] == [False] * PILOT + [True]
    assert draws[0].share == 0
    assert "choose the rules" in draws[0].reason


def test_evidence_opens_the_strictest_rule_first_and_it_serves_its_own_hits_alone() -> None:
    gate = opened()
    low, high = hit(gate, 0.01), hit(gate, 0.99)
    assert (low.served, low.share, low.opened) == (True, 0.02, 1)
    assert (high.served, high.share, high.opened) == (False, 1.0, 1)
    report = gate.report("a")
    assert (report.rules, report.delta, report.confidence) == (1, 0.2, 0.95)
    assert report.upper is not None
    assert 0.1 < report.upper <= 0.2, "30 right labels exclude no less"


def test_an_unlabelled_share_is_as_large_as_asked() -> None:
    draw = gate_of(chance=0.3, explore_share=0.3)
    pilot(draw)
    assert not hit(draw).labelled
    almost = gate_of(chance=0.2999, explore_share=0.3)
    pilot(almost)
    assert hit(almost).labelled


def test_labels_count_in_the_order_of_their_draws() -> None:
    """Else right answers that are found sooner than wrong ones would open a rule before the wrong ones are known."""
    gate = gate_of()
    pilot(gate)
    first, *others = [hit(gate, 0.0) for _ in range(40)]
    for draw in others:
        gate.learn(draw, False)
    report = gate.report("a")
    assert (report.gate, report.explored, report.classes[0].pending) == ("closed", 0, 40)
    gate.learn(first, True)
    assert gate.report("a").explored == 40


def test_a_lost_label_is_none_and_holds_nobody_up() -> None:
    gate = gate_of()
    pilot(gate)
    first, second, _third = hit(gate), hit(gate), hit(gate)
    gate.learn(second, False)
    gate.lost(first)
    gate.lost(first)
    gate.learn(first, False)
    report = gate.report("a")
    assert (report.explored, report.lost, report.classes[0].pending) == (1, 1, 1)


def test_a_label_that_never_comes_counts_as_wrong_at_last() -> None:
    gate = gate_of()
    pilot(gate)
    forgotten = hit(gate)
    for _ in range(MAX_PENDING):
        gate.learn(hit(gate), False)
    report = gate.report("a")
    assert (report.explored, report.explored_wrong) == (MAX_PENDING + 1, 1)
    gate.learn(forgotten, False)
    assert gate.report("a").explored == MAX_PENDING + 1


def test_wrong_audits_close_the_gate_and_the_evidence_begins_anew() -> None:
    gate = opened()
    audits = [hit(gate, 0.0) for _ in range(30)]
    for draw in audits:
        gate.learn(draw, True)
    report = gate.report("a")
    assert (report.gate, report.alarms, report.upper, report.rules) == ("closed", 1, None, 0)
    assert not hit(gate, 0.0).served
    stale = report.classes[0].counts.stale
    assert report.audited + stale == 30  # what was drawn before the alarm teaches nothing after it
    assert stale > 0
    pilot(gate)
    assert gate.report("a").classes[0].rules[0].labels == 0


def test_nothing_more_is_served_while_too_many_audits_are_awaited() -> None:
    """A server that is never idle would else serve unaudited."""
    gate = opened()
    audits = [hit(gate, 0.0) for _ in range(MAX_AUDITS)]
    assert all(draw.served and draw.labelled for draw in audits)
    waits = hit(gate, 0.0)
    assert (waits.served, waits.labelled, waits.reason) == (False, False, "32 served hits wait for their audits")
    gate.learn(audits[0], False)
    assert hit(gate, 0.0).served


def test_wrong_audits_in_short_order_have_every_served_hit_audited() -> None:
    gate = opened(audit_share=0.02)
    calm = hit(gate, 0.0)
    assert (calm.share, calm.warned) == (0.02, False)
    gate.learn(calm, True)
    warned = hit(gate, 0.0)
    while not warned.warned:
        gate.learn(warned, True)
        warned = hit(gate, 0.0)
    assert (warned.served, warned.share) == (True, 1.0)
    for _ in range(40):
        gate.learn(warned, False)
        warned = hit(gate, 0.0)
    assert (warned.share, warned.warned) == (0.02, False)


@pytest.mark.parametrize("known", [{"epoch": "other"}, {"method": "blend"}, {"setting": "strict"}, {"partition": "b"}])
def test_evidence_of_another_class_opens_nothing(known: dict[str, str]) -> None:
    gate = opened()
    assert hit(gate, 0.0).served
    pilot(gate, **known)
    assert not hit(gate, 0.0, **known).served


def test_a_group_shares_evidence_and_reports() -> None:
    gate = opened(trust_groups=("team=a,b",))
    assert hit(gate, 0.0, partition="b").served
    assert not hit(gate, 0.0, partition="team").served
    assert gate.report("b").explored == 36
    assert gate.report("c").explored == 0
    assert gate.report().explored == 36


def test_a_report_of_all_groups_tells_the_worst() -> None:
    gate = opened()
    pilot(gate, "b")
    teach(gate, 60, partition="b")
    worse, better, both = (gate.report(partition) for partition in ("a", "b", None))
    assert worse.upper is not None
    assert better.upper is not None
    assert both.upper == worse.upper > better.upper
    assert (both.rules, both.explored) == (worse.rules + better.rules, worse.explored + better.explored)


def test_features_that_are_no_numbers_are_the_riskiest() -> None:
    gate = opened()
    draw = gate.draw(gate.class_of("a", "e", "adopt", "default"), {"score": float("nan")})
    assert (draw.risk, draw.served) == (1.0, False)


def late(gate: TrustGate, margin: float, wrong: bool) -> HitDraw:
    """A hit of a late class, with its label if it is to have one."""
    cls = gate.class_of("p", "e", LATE_BLEND, "s")
    if gate.tries(cls, {}):
        draw = gate.draw(cls, {"first_margin": margin})
        if draw.labelled:
            gate.learn(draw, wrong)
        return draw
    draw = gate.draw(cls, {}, late=True)
    assert not draw.served
    if draw.labelled:
        gate.learn(draw, wrong, {"first_margin": margin})
    return draw


def test_a_risk_that_is_known_late_opens_rules_for_those_that_are_sure() -> None:
    """Half of the hits are unsure and wrong half of the time: no order that is known before would open any rule."""
    chance = random.Random(4)
    gate = TrustGate(TrustSettings(error_bound=0.1, audit_share=0.5), random=chance.random)
    served: list[float] = []
    for _ in range(1500):
        margin = chance.choice([chance.uniform(0, 0.5), chance.uniform(1, 4)])
        draw = late(gate, margin, margin < 0.5 and chance.random() < 0.5)
        if draw.served:
            served.append(margin)
    assert len(served) > 300
    assert min(served) > 0.5
    report = gate.report("p")
    assert report.gate == "open"
    assert report.wrong == 0
    cls = gate.class_of("p", "e", LATE_BLEND, "s")
    assert gate.tries(cls, {"time_share": 0.1})
    assert not gate.tries(cls, {"time_share": 0.9}), "it takes nearly as long as full computation"
    refused = gate.draw(cls, {}, late=True)  # it was found closed, and has opened meanwhile
    assert (refused.served, refused.labelled) == (False, False)


def test_a_try_that_failed_counts_for_every_rule_and_a_right_one_without_a_risk_for_none() -> None:
    gate = TrustGate(TrustSettings(error_bound=0.1, audit_share=0.5))
    for _ in range(PILOT):
        late(gate, 1.0, False)
    cls = gate.class_of("p", "e", LATE_BLEND, "s")
    before = gate.report("p").classes[0]
    gate.learn(gate.draw(cls, {}, late=True), False)
    assert gate.report("p").lost == 1
    gate.learn(gate.draw(cls, {}, late=True), True)
    after = gate.report("p").classes[0]
    assert [rule.labels for rule in after.rules] == [rule.labels + 1 for rule in before.rules]
    assert [rule.wrong for rule in after.rules] == [1] * len(after.rules)


def test_a_late_label_that_never_comes_counts_for_every_rule() -> None:
    """Its risk is known to nobody, and whoever keeps it back might know that it is a strict rule's."""
    gate = TrustGate(TrustSettings(error_bound=0.1, audit_share=0.5))
    for number in range(PILOT):
        late(gate, number / 4, False)
    cls = gate.class_of("p", "e", LATE_BLEND, "s")
    gate.draw(cls, {}, late=True)
    for _ in range(MAX_PENDING):
        gate.lost(gate.draw(cls, {}, late=True))
    report = gate.report("p")
    assert len(report.classes[0].rules) > 1
    assert [rule.wrong for rule in report.classes[0].rules] == [1] * len(report.classes[0].rules)


def test_outcomes_of_draws_that_were_not_to_be_labelled_are_refused() -> None:
    gate = gate_of()
    with pytest.raises(InputError, match="not to be labelled"):
        gate.learn(hit(gate), False)
    gate.lost(hit(gate))
    assert gate.report("a").lost == 0
