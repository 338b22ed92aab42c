"""Copied text in the finder: donors of a blend, from as many prompts as hold it."""

from dataclasses import replace

from tests.find.finders import WORDS, copied, finder_of, id_of, similar

from dejakv.decide.levels.base import Match
from dejakv.decide.plan import Ask


def test_a_blend_takes_state_from_all_prompts_that_hold_its_text() -> None:
    """Two passages of two earlier prompts, in another order: no prefix, and no likeness is asked for."""
    first, second = copied((1, 2, 3), WORDS[:100]), copied((4, 5), WORDS[100:180])
    level = similar()
    made = finder_of(first, second, level=level)
    asked = copied((7, 8), WORDS[100:180], (9,), WORDS[:100], tuple(range(50, 60)))
    decision = made.decide(asked, Ask("blend"))
    assert (decision.plan.method, level.asked) == ("blend", 0)
    assert [meta.id for meta in decision.plan.donors] == [id_of(first), id_of(second)]
    assert decision.plan.match == Match(id_of(first), "copied", 180 / 193)
    assert decision.found.copied == 180
    assert decision.found.runs == ((2, 80), (83, 100))
    assert decision.statuses["copied"] == "hit"
    assert made.decide(asked, Ask("blend", donors=1)).plan.donors == decision.plan.donors[:1]
    assert made.decide(asked, Ask("blend", threshold=0.9)).plan.donors == decision.plan.donors
    assert made.decide(asked, Ask("blend", threshold=0.95)).statuses["copied"] == "miss"
    assert made.decide(asked, Ask("adopt")).plan.donors == ()
    assert made.decide(asked, Ask("exact")).plan.method == "none"


def test_a_prompt_with_too_much_new_text_is_computed_and_so_becomes_a_donor() -> None:
    made = finder_of(copied((1, 2, 3), WORDS[:100]))
    asked = copied(tuple(range(2000, 2400)), WORDS[:100])
    decision = made.decide(asked, Ask("blend"))
    assert (decision.plan.method, decision.statuses["copied"]) == ("none", "miss")


def test_copied_text_of_another_tenant_or_model_is_not_found() -> None:
    stored = copied((1, 2, 3), WORDS[:100])
    made = finder_of(stored)
    asked = copied((7, 8), WORDS[:100])
    assert made.decide(asked, Ask("blend")).plan.method == "blend"
    foreign = [replace(asked, epoch="f"), replace(asked, request=replace(asked.request, partition="q"))]
    for other in foreign:
        assert made.decide(other, Ask("blend")).plan.method == "none"
    made.remove(id_of(stored))
    assert made.decide(asked, Ask("blend")).plan.method == "none"


def test_copied_text_can_be_switched_off() -> None:
    made = finder_of(copied((1, 2, 3), WORDS[:100]), copied_text=False)
    decision = made.decide(copied((7, 8), WORDS[:100]), Ask("blend"))
    assert (decision.plan.method, "copied" in decision.statuses) == ("none", False)


def test_an_exact_prefix_that_holds_the_copied_text_is_preferred() -> None:
    made = finder_of(copied(WORDS[:100]))
    chosen = made.decide(copied(WORDS[:100], tuple(range(2000, 2040))), Ask("blend")).plan
    assert (chosen.method, chosen.reused) == ("prefix", 100)
