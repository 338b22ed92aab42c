"""The rule for rows that every engine follows, on plain tensors."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dejakv.reuse.blend import BlendConfig, not_worth
from dejakv.reuse.need import Need
from dejakv.reuse.rows import RowPlan
from dejakv.reuse.schedule import Schedule, constant
from dejakv.reuse.selector import Selector, choose
from dejakv.reuse.surroundings import Surroundings
from dejakv.reuse.token_map import Donors

TOKENS = 20


def plan(share: float = 0.5, forced: tuple[int, ...] = (18, 19), **more: object) -> RowPlan:
    mask = torch.zeros(TOKENS, dtype=torch.bool)
    mask[list(forced)] = True
    values: dict[str, object] = {"selector": Selector("similarity"), "similarity": torch.ones(TOKENS), **more}
    return RowPlan(schedule=constant(3, share), forced=mask, **values)  # pyright: ignore


def test_forced_rows_and_the_best_of_the_rest_up_to_the_share() -> None:
    scores = torch.arange(TOKENS).float()
    assert plan(0.25).kept(1, torch.arange(TOKENS), scores).tolist() == [15, 16, 17, 18, 19]
    assert plan(0.05).kept(1, torch.arange(TOKENS), scores).tolist() == [18, 19]


def test_by_need_rows_above_the_threshold_come_beyond_the_share() -> None:
    scores = torch.zeros(TOKENS)
    scores[:6] = 1.0
    kept = plan(0.1, threshold=0.5).kept(1, torch.arange(TOKENS), scores)
    assert kept.tolist() == [0, 1, 2, 3, 4, 5, 18, 19]


def test_rows_that_the_budget_left_are_chosen_last_of_all() -> None:
    left = torch.zeros(TOKENS, dtype=torch.bool)
    left[:15] = True
    kept = plan(0.5, left=left).kept(1, torch.arange(TOKENS), torch.ones(TOKENS) - left.float())
    assert kept.tolist() == [15, 16, 17, 18, 19]


def test_of_equal_scores_the_first_rows_are_chosen() -> None:
    """Whatever rows stand behind them: two engines that rank other ends choose alike."""
    none = torch.zeros(TOKENS, dtype=torch.bool)
    assert choose(torch.ones(TOKENS), none, 5).tolist() == choose(torch.ones(TOKENS)[:12], none[:12], 5).tolist()


def test_the_share_pays_for_the_whole_prompt() -> None:
    assert plan(0.5).counts == (10, 10, 10)
    assert plan(0.5, first=10).counts == (5, 5, 5)  # half of the rows are there: half of the share is saved
    assert plan(0.5, stop=18).counts == (8, 8, 8)  # two of the ten are computed by somebody else
    assert plan(0.5, first=10, stop=19).counts == (4, 4, 4)
    assert plan(0.05, stop=18).counts == (0, 0, 0)


@given(st.floats(0, 1), st.integers(0, 17), st.integers(18, 20))
def test_what_others_compute_is_never_chosen_twice(share: float, first: int, stop: int) -> None:
    """The rows of one pass and the forced ones behind it are never more than those of a pass over all, but for rounding."""
    made = plan(share, first=first, stop=stop)
    rows = torch.arange(first, stop)
    kept = made.kept(1, rows, torch.rand(len(rows))) if made.counts[1] < len(rows) else torch.arange(len(rows))
    assert len(kept) <= max(plan(share).counts[1], 2)


def test_scores_matter_only_beyond_the_forced_rows() -> None:
    assert plan(0.5).ranks
    assert not plan(0.1).ranks
    assert not plan(1.0).ranks
    assert not plan(0.5, forced=tuple(range(10))).ranks


def test_the_first_layer_cannot_be_compared() -> None:
    made = plan(selector=Selector("value"))
    first = made.known_scores(0)
    assert first is not None
    assert first.tolist() == [0.0] * TOKENS
    assert made.known_scores(1) is None
    assert plan(scores=torch.ones(TOKENS), selector=Selector("value")).known_scores(1) is not None


def test_the_pass_of_the_question_computes_it_alone_and_what_is_complete() -> None:
    made = RowPlan(
        Schedule((1.0, 0.3, 0.2)), Selector("query"), torch.ones(TOKENS), torch.ones(TOKENS, dtype=torch.bool)
    )
    asked = made.of_question(4)
    assert asked.counts[0] == TOKENS
    assert asked.kept(1, torch.arange(TOKENS), torch.rand(TOKENS)).tolist() == [16, 17, 18, 19]


def test_donors_are_read_where_something_is_taken() -> None:
    donors = Donors.of([1, 2, 3], [4, 5], [6, 7, 8, 9])
    parts = [
        (number, rows.tolist(), places.tolist()) for number, rows, places in donors.parts(np.array([6, 0, 8, 5, 2]))
    ]
    assert parts == [(0, [1, 4], [0, 2]), (2, [0, 2, 3], [1, 3, 0])]


def test_what_is_there_already_does_not_count_against_a_blend() -> None:
    """Behind a beginning of half of the prompt, half of the rows are computed at most."""
    config = BlendConfig(max_computed=0.5, share=0.8)
    none, forced = np.zeros(20, bool), np.arange(20) >= 3
    assert "the exact prefix is cheaper" in not_worth(config, Need(none, none, 1, none), 4)
    assert not_worth(config, Need(none, none, 1, none, exact=10), 4) == ""
    assert "too little is alike" in not_worth(config, Need(forced, none, 1, none), 4)


def test_rows_of_all_layers_are_those_that_each_layer_keeps() -> None:
    scores = torch.arange(TOKENS).float()
    for chosen in (plan(0.5, scores=scores, first=3, stop=18), plan(0.1, threshold=0.5, scores=scores / 19), plan(1.0)):
        rows = torch.arange(chosen.first, chosen.end)
        for layer in range(3):
            if chosen.counts[layer] < len(rows):
                known = chosen.known_scores(layer)
                assert known is not None
                rows = rows[chosen.kept(layer, rows, known[rows])]
            assert rows.tolist() == chosen.fixed().tolist()


def test_the_questions_attention_is_weighed_by_the_surroundings() -> None:
    """At equal attention the row next to the change comes first; where nothing is known of surroundings all count alike."""
    index = np.arange(TOKENS)
    around = Surroundings(np.zeros(TOKENS, np.float32), np.where(index < 10, index, index - 10))
    scores = torch.linspace(1.0, 1.1, TOKENS)
    weighed = plan(0.25, scores=scores, around=around)
    assert weighed.fixed().tolist() == [0, 10, 11, 18, 19]
    assert plan(0.25, scores=scores).fixed().tolist() == [15, 16, 17, 18, 19]
    moved = replace(around, changed=np.ones(TOKENS, np.float32))
    assert plan(0.25, scores=scores, around=moved).fixed().tolist() == [15, 16, 17, 18, 19]


def test_only_the_questions_attention_is_weighed() -> None:
    """A map's fit and measured deviations already tell where something changed."""
    around = Surroundings(np.zeros(TOKENS, np.float32), np.arange(TOKENS))
    fit = torch.linspace(1.0, 0.0, TOKENS)
    assert plan(0.25, similarity=fit, around=around).fixed().tolist() == plan(0.25, similarity=fit).fixed().tolist()
