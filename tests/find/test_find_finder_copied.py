"""Copied text in the finder: donors of a blend, from as many prompts, and rows of blended prompts, as hold it."""

import numpy as np
from tests.find.conftest import WORDS, copied, described, finder_of, id_of, similar

from dejakv.decide.finder import DonorFinder
from dejakv.decide.levels.base import Match
from dejakv.decide.plan import ReuseRequest
from dejakv.store.base import ROWS, RawTensor, StateInfo, StoredState


def test_a_blend_takes_state_from_all_prompts_that_hold_its_text() -> None:
    """Two passages of two earlier prompts, in another order: no prefix, and no likeness is asked for."""
    first, second = copied((1, 2, 3), WORDS[:100]), copied((4, 5), WORDS[100:180])
    level = similar()
    made = finder_of(first, second, level=level)
    asked = copied((7, 8), WORDS[100:180], (9,), WORDS[:100], tuple(range(50, 60)))
    decision = made.decide(asked, ReuseRequest("blend"))
    assert (decision.plan.method, level.asked) == ("blend", 0)
    assert [meta.id for meta in decision.plan.donors] == [id_of(first), id_of(second)]
    assert decision.plan.match == Match(id_of(first), "copied", 180 / 193)
    assert decision.donor_search.copied == 180
    assert decision.donor_search.runs == ((2, 80), (83, 100))
    assert decision.statuses["copied"] == "hit"
    assert made.decide(asked, ReuseRequest("blend", donors=1)).plan.donors == decision.plan.donors[:1]
    assert made.decide(asked, ReuseRequest("blend", threshold=0.9)).plan.donors == decision.plan.donors
    assert made.decide(asked, ReuseRequest("blend", threshold=0.95)).statuses["copied"] == "miss"
    assert made.decide(asked, ReuseRequest("adopt")).plan.donors == ()
    assert made.decide(asked, ReuseRequest("exact")).plan.method == "none"


def test_a_prompt_with_too_much_new_text_is_computed_and_so_becomes_a_donor() -> None:
    made = finder_of(copied((1, 2, 3), WORDS[:100]))
    asked = copied(tuple(range(2000, 2400)), WORDS[:100])
    decision = made.decide(asked, ReuseRequest("blend"))
    assert (decision.plan.method, decision.statuses["copied"]) == ("none", "miss")


def rows_of(made: DonorFinder, tokens: tuple[int, ...], generation: int = 1, name: str = "rows") -> StateInfo:
    """Stores rows of a blended prompt; their description."""
    meta = StateInfo(name, "p", "e", tokens, "", "", kind=ROWS, position=700, generation=generation)
    made.store.put(StoredState(meta, RawTensor(np.zeros((2, 1, 1, len(tokens), 1), np.float32), "F32")))
    made.add(meta)
    return meta


def test_of_equal_runs_the_least_generation_is_taken() -> None:
    made = finder_of(max_generation=3)
    names = [rows_of(made, WORDS[:100], generation=g, name=f"rows {g}").id for g in (2, 1, 3)]
    asked = copied((7, 8), WORDS[:100])
    assert [meta.id for meta in made.decide(asked, ReuseRequest("blend")).plan.donors] == [names[1]]
    exact = copied((1, 2, 3), WORDS[:100])
    made.store.put(StoredState(described(exact), RawTensor(np.zeros((2, 1, 1, 103, 1), np.float32), "F32")))
    made.add(described(exact))
    assert [meta.id for meta in made.decide(asked, ReuseRequest("blend")).plan.donors] == [id_of(exact)]


def test_rows_are_found_where_the_index_of_copied_text_is_made_late() -> None:
    made = finder_of()
    late = rows_of(made, WORDS[:100])
    other = StateInfo("other", "p", "e", WORDS[100:300], "", "", kind="encoder output")
    made.store.put(StoredState(other, RawTensor(np.zeros((2, 1, 1, 200, 1), np.float32), "F32")))
    assert [meta.id for meta in made.decide(copied((7, 8), WORDS[:100]), ReuseRequest("blend")).plan.donors] == [
        late.id
    ]
    assert made.decide(copied((7, 8), WORDS[100:300]), ReuseRequest("blend")).plan.method == "none"
