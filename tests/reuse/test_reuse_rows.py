"""The rule for rows that every engine follows, on plain tensors."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dejakv.blend.blend import refusal_reason
from dejakv.blend.forced import ForcedTokens
from dejakv.blend.recomputed import RecomputePlan, TextSurroundings, highest
from dejakv.blend.settings import BlendConfig
from dejakv.blend.token_map import DonorTokens, TokenMap

TOKENS = 20


def plan(share: float = 0.5, forced: tuple[int, ...] = (18, 19), **more: object) -> RecomputePlan:
    mask = torch.zeros(TOKENS, dtype=torch.bool)
    mask[list(forced)] = True
    return RecomputePlan(share, forced=mask, **{"similarity": torch.ones(TOKENS), **more})  # pyright: ignore


def test_forced_rows_and_the_best_of_the_rest_up_to_the_share() -> None:
    scores = torch.arange(TOKENS).float()
    assert plan(0.25, attention=scores).tokens.tolist() == [15, 16, 17, 18, 19]
    assert plan(0.05, attention=scores).tokens.tolist() == [18, 19]


def test_rows_that_the_budget_left_are_chosen_last_of_all() -> None:
    left = torch.zeros(TOKENS, dtype=torch.bool)
    left[:15] = True
    assert plan(0.5, excluded=left, attention=torch.ones(TOKENS)).tokens.tolist() == [15, 16, 17, 18, 19]


def test_of_equal_scores_the_first_rows_are_chosen() -> None:
    """Whatever rows stand behind them: two engines that rank other ends choose alike."""
    none = torch.zeros(TOKENS, dtype=torch.bool)
    assert highest(torch.ones(TOKENS), none, 5).tolist() == highest(torch.ones(TOKENS)[:12], none[:12], 5).tolist()


def test_the_share_pays_for_the_whole_prompt() -> None:
    assert plan(0.5).count == 10
    assert plan(0.5, first=10).count == 5  # half of the rows are there: half of the share is saved
    assert plan(0.5, stop=18).count == 8  # two of the ten are computed by somebody else
    assert plan(0.5, first=10, stop=19).count == 4
    assert plan(0.05, stop=18).count == 0


@given(st.floats(0, 1), st.integers(0, 17), st.integers(18, 20))
def test_what_others_compute_is_never_chosen_twice(share: float, first: int, stop: int) -> None:
    """The rows of one pass and the forced ones behind it are never more than those of a pass over all, but for rounding."""
    made = plan(share, first=first, stop=stop, attention=torch.rand(TOKENS))
    assert len(made.tokens) <= max(plan(share).count, 2)
    assert first <= int(made.tokens.min()) if len(made.tokens) else True


@pytest.mark.parametrize(
    ("selector", "share", "forced", "asks"),
    [
        ("prophet", 0.5, 2, True),
        ("similarity", 0.5, 2, False),
        ("prophet", 0.1, 2, False),
        ("prophet", 1.0, 2, False),
        ("prophet", 0.5, 10, False),
    ],
)
def test_the_question_is_asked_only_where_scores_matter(selector: Any, share: float, forced: int, asks: bool) -> None:
    """That is, beyond the forced tokens."""
    target = np.arange(TOKENS)
    found = TokenMap(target, np.ones(TOKENS, np.float32), np.zeros(TOKENS, np.int64))
    needed = ForcedTokens(target >= TOKENS - forced, target < 0, forced, target < 0)
    config = BlendConfig(selector=selector, share=share)
    made = RecomputePlan.of(config, target, DonorTokens.of(target), found, needed)
    assert made.needs_question_pass == asks
    assert not made.with_attention(torch.ones(TOKENS)).needs_question_pass


def test_the_pass_of_the_question_computes_it_alone() -> None:
    assert plan(0.5).of_question(4).tokens.tolist() == [16, 17, 18, 19]


def test_another_choice_sees_scores_and_forced_tokens() -> None:
    seen: list[Any] = []

    def last(scores: torch.Tensor, forced: torch.Tensor, count: int) -> torch.Tensor:
        seen.append((scores.tolist(), forced.sum().item(), count))
        return torch.arange(len(scores) - count, len(scores))

    left = torch.arange(TOKENS) < 1
    made = plan(0.25, choose=last, excluded=left, similarity=torch.full((TOKENS,), 0.5))
    assert made.tokens.tolist() == [15, 16, 17, 18, 19]
    assert seen == [([-1.0] + [0.5] * 19, 2, 5)]


def test_donors_are_read_where_something_is_taken() -> None:
    donors = DonorTokens.of([1, 2, 3], [4, 5], [6, 7, 8, 9])
    parts = [
        (number, rows.tolist(), places.tolist()) for number, rows, places in donors.parts(np.array([6, 0, 8, 5, 2]))
    ]
    assert parts == [(0, [1, 4], [0, 2]), (2, [0, 2, 3], [1, 3, 0])]


def test_what_is_there_already_does_not_count_against_a_blend() -> None:
    """Behind a beginning of half of the prompt, half of the rows are computed at most."""
    config = BlendConfig(max_computed=0.5, share=0.8)
    none, forced = np.zeros(20, bool), np.arange(20) >= 3
    assert "the exact prefix is cheaper" in refusal_reason(config, ForcedTokens(none, none, 1, none))
    assert refusal_reason(config, ForcedTokens(none, none, 1, none, exact=10)) == ""
    assert "too little is alike" in refusal_reason(config, ForcedTokens(forced, none, 1, none))


def test_the_questions_attention_is_weighed_by_the_surroundings() -> None:
    """At equal attention the row next to the change comes first; where nothing is known of surroundings all count alike."""
    index = np.arange(TOKENS)
    around = TextSurroundings(np.zeros(TOKENS, np.float32), np.where(index < 10, index, index - 10))
    scores = torch.linspace(1.0, 1.1, TOKENS)
    weighed = plan(0.25, attention=scores, around=around)
    assert weighed.tokens.tolist() == [0, 10, 11, 18, 19]
    assert plan(0.25, attention=scores).tokens.tolist() == [15, 16, 17, 18, 19]
    moved = replace(around, changed=np.ones(TOKENS, np.float32))
    assert plan(0.25, attention=scores, around=moved).tokens.tolist() == [15, 16, 17, 18, 19]


def test_only_the_questions_attention_is_weighed() -> None:
    """A map's fit and measured deviations already tell where something changed."""
    around = TextSurroundings(np.zeros(TOKENS, np.float32), np.arange(TOKENS))
    fit = torch.linspace(1.0, 0.0, TOKENS)
    assert plan(0.25, similarity=fit, around=around).tokens.tolist() == plan(0.25, similarity=fit).tokens.tolist()
