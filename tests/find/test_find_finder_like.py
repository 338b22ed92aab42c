"""Donors that are only like a prompt, beside those that hold copied text: one blend takes state from both."""

from dataclasses import replace

import pytest
from tests.find.finders import ASKED, SIMILAR, WORDS, Likes, copied, finder_of, id_of, similar

from dejakv.costs import SEEN, Costs
from dejakv.engines.base import Prepared
from dejakv.find.ask import Ask
from dejakv.find.decision import settled
from dejakv.find.finder import Finder
from dejakv.find.ways import Plan
from dejakv.guards.threshold import ThresholdGuard
from dejakv.identity import exact_key

HOLDS_COPY = copied((1, 2, 3), WORDS[:100], text="what holds a part of it?")
BOTH = copied((7, 8), WORDS[:100], ASKED.token_ids)
"""100 tokens stand in `HOLDS_COPY` in one run, 100 in `SIMILAR` in runs of 19."""

ROWS = Costs(row=1e-3)


def made_of(*stored: Prepared, level: Likes | None = None, least: float = 0.8) -> Finder:
    guards = (ThresholdGuard({"semantic_text": least}),)
    return finder_of(*(stored or (HOLDS_COPY, SIMILAR)), level=level or similar(), guards=guards)


def donors(plan: Plan) -> list[str]:
    return [meta.id for meta in plan.donors]


@pytest.mark.parametrize("costs", [ROWS, None])
def test_both_kinds_of_donors_join_one_blend(costs: Costs | None) -> None:
    made = made_of()
    decision = made.find(BOTH, Ask("blend"), costs=costs)
    assert donors(decision.plan) == [id_of(HOLDS_COPY), id_of(SIMILAR)]
    assert (decision.plan.name, decision.plan.like) == ("blend with like text", 1)
    assert (decision.statuses["copied"], decision.statuses["semantic_text"]) == ("hit", "hit")
    assert decision.found.copied == 100, "likeness is not copied text"
    assert decision.plan.reused > 150, "what both hold is counted together"


@pytest.mark.parametrize(("byte", "joined"), [(0.0, True), (5e-4, True), (7e-4, False)])
def test_another_donor_must_pay_for_being_loaded(byte: float, joined: bool) -> None:
    """It saves 62 of 102 rows, and 100 tokens are loaded for that."""
    decision = made_of().find(BOTH, Ask("blend"), costs=replace(ROWS, token_bytes=1.0, byte=byte))
    assert (id_of(SIMILAR) in donors(decision.plan)) == joined
    assert decision.statuses["semantic_text"] == ("hit" if joined else "miss")
    assert decision.statuses["copied"] == "hit"
    assert [way.plan.name for way in decision.ways] == ["full", "blend", "blend with like text"]


def test_where_little_is_new_no_level_is_asked() -> None:
    level = similar()
    asked = copied((7, 8), WORDS[:100], ASKED.token_ids[:60])
    decision = made_of(level=level).find(asked, Ask("blend"), costs=ROWS)
    assert (donors(decision.plan), level.asked) == ([id_of(HOLDS_COPY)], 0)
    assert decision.statuses["semantic_text"] == "skip"


@pytest.mark.parametrize("ask", [Ask("blend", donors=1), Ask("blend", levels=False)])
def test_nor_where_there_is_no_room_or_no_level_is_wanted(ask: Ask) -> None:
    level = similar()
    decision = made_of(level=level).find(BOTH, ask, costs=ROWS)
    assert (donors(decision.plan), level.asked) == ([id_of(HOLDS_COPY)], 0)


def test_nor_where_asking_takes_about_as_long_as_computing() -> None:
    """Until that has been so for a while: what made the levels slow may be over."""
    level = similar()
    made = made_of(level=level)
    for _ in range(SEEN):
        made.likeness.seconds.add(0.03)
    for _ in range(SEEN):
        decision = made.find(BOTH, Ask("blend"), costs=ROWS)
        assert (donors(decision.plan), level.asked) == ([id_of(HOLDS_COPY)], 0)
    made.find(BOTH, Ask("blend"), costs=ROWS)
    assert level.asked == 1


def test_guards_judge_them_as_any_donor() -> None:
    made = made_of(least=0.95)
    decision = made.find(BOTH, Ask("blend"), costs=ROWS)
    assert donors(decision.plan) == [id_of(HOLDS_COPY)]
    assert made.counts.of("p").rejections == {"threshold": 1}


def test_one_that_holds_nothing_more_does_not_join() -> None:
    """Another prompt with the copied text, and one that is alike in meaning alone."""
    again = copied((4, 5), WORDS[:100], text="what else holds it?")
    other = copied(tuple(range(5000, 5200)), text="what is meant?")
    level = Likes({id_of(again): 0.99, id_of(other): 0.98})
    for costs in (ROWS, None):
        decision = made_of(HOLDS_COPY, again, other, level=level).find(BOTH, Ask("blend"), costs=costs)
        assert len(decision.plan.donors) == 1
        assert [way.plan.name for way in decision.ways] == ["full", "blend"]


@pytest.mark.parametrize("costs", [ROWS, None])
def test_one_that_holds_nothing_more_is_left_out_beside_one_that_does(costs: Costs | None) -> None:
    other = copied(tuple(range(5000, 5200)), text="what is meant?")
    level = Likes({id_of(other): 0.98, id_of(SIMILAR): 0.9})
    decision = made_of(HOLDS_COPY, SIMILAR, other, level=level).find(BOTH, Ask("blend"), costs=costs)
    assert donors(decision.plan) == [id_of(HOLDS_COPY), id_of(SIMILAR)]


def test_nor_one_that_saves_no_rows_where_costs_are_not_known() -> None:
    """The share of rows that is computed in any case is more than what is new."""
    guards = (ThresholdGuard({"semantic_text": 0.8}),)
    made = finder_of(HOLDS_COPY, SIMILAR, level=similar(), guards=guards, blend_share=0.6)
    decision = made.find(BOTH, Ask("blend"))
    assert [way.plan.name for way in decision.ways] == ["full", "blend", "blend with like text"]
    assert donors(decision.plan) == [id_of(HOLDS_COPY)]


def test_nor_does_one_that_holds_the_question_alone() -> None:
    """It is computed in any case."""
    question = tuple(range(6000, 6030))
    asked = copied((7, 8), WORDS[:100], tuple(range(5000, 5070)), question)
    other = copied(tuple(range(7000, 7100)), question, text="what is asked there?")
    decision = made_of(HOLDS_COPY, other, level=Likes({id_of(other): 0.99})).find(asked, Ask("blend"), costs=ROWS)
    assert donors(decision.plan) == [id_of(HOLDS_COPY)]


def test_a_donor_of_copied_text_is_not_counted_twice() -> None:
    level = Likes({id_of(HOLDS_COPY): 0.99, id_of(SIMILAR): 0.9})
    decision = made_of(level=level).find(BOTH, Ask("blend"), costs=ROWS)
    assert donors(decision.plan) == [id_of(HOLDS_COPY), id_of(SIMILAR)]


def test_they_blend_behind_an_exact_prefix_too() -> None:
    first = tuple(range(3000, 3400))
    begun = copied(first, text="what begins with it?")
    asked = copied(first, WORDS[:100], ASKED.token_ids)
    made = made_of(begun, HOLDS_COPY, SIMILAR)
    decision = made.find(asked, Ask("blend"), costs=replace(ROWS, token_bytes=1.0, byte=1e-6))
    assert set(donors(decision.plan)) == {id_of(begun), id_of(HOLDS_COPY), id_of(SIMILAR)}
    assert decision.plan.name == "blend with like text behind the exact prefix"
    assert decision.plan.kept == 400


@pytest.mark.parametrize("other", [{"partition": "q"}, {"epoch": "f"}])
def test_donors_of_another_tenant_or_model_do_not_join(other: dict[str, str]) -> None:
    request = replace(SIMILAR.request, partition=other.get("partition", "p"))
    foreign = replace(SIMILAR, request=request, epoch=other.get("epoch", "e"))
    key = exact_key(request.partition, foreign.epoch, foreign.token_ids, ())
    decision = made_of(HOLDS_COPY, foreign, level=Likes({key: 0.99})).find(BOTH, Ask("blend"), costs=ROWS)
    assert donors(decision.plan) == [id_of(HOLDS_COPY)]


def test_a_level_whose_donor_was_not_loaded_in_the_end_is_no_hit() -> None:
    decision = made_of().find(BOTH, Ask("blend"), costs=ROWS)
    assert settled(decision.statuses, decision.exact) == {"copied": "miss", "semantic_text": "miss", "kv_cache": "miss"}
