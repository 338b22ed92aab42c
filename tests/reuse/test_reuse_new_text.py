"""New text of a blended prompt: what is worth keeping, and where rows of another prompt's middle belong."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.blend.forced import mark_forced
from dejakv.blend.maps import token_map
from dejakv.blend.token_map import DonorTokens, Ids, TokenMap, equal_runs, long_runs, mark_new_text, stretches

HELD, NEW = np.arange(1000, 1100), np.arange(5000, 5060)
EVERY_TOKEN = np.array([9])
"""Sentence ends that do not occur, so that a text is one sentence."""


def embed(ids: Any) -> np.ndarray:
    table = np.random.default_rng(3).standard_normal((6000, 32)).astype(np.float32)
    return table[np.asarray(ids)]


def mapped(target: Ids, donors: DonorTokens) -> TokenMap:
    return token_map("context", target, donors, embed, ends=EVERY_TOKEN)


def runs(target: Ids, donors: DonorTokens, computed: Any = True, least: int = 32) -> tuple[tuple[int, int], ...]:
    return long_runs(mark_new_text(target, donors, mapped(target, donors), least) & computed, least)


def test_new_text_between_copied_text_is_kept_and_copied_text_is_not() -> None:
    target = np.concatenate([HELD[:50], NEW, HELD[50:]])
    assert runs(target, DonorTokens.of(HELD)) == ((50, 110),)


def test_only_rows_that_every_layer_computed_are_kept() -> None:
    target = np.concatenate([HELD, NEW])
    computed = np.ones(len(target), dtype=bool)
    computed[140] = False
    assert runs(target, DonorTokens.of(HELD), computed) == ((100, 140),)
    assert runs(target, DonorTokens.of(HELD), ~computed) == ()


def test_a_run_ends_at_a_picture_and_below_the_least_length() -> None:
    target = np.concatenate([HELD, NEW])
    target[140:142] = (-70, -71)
    assert runs(target, DonorTokens.of(HELD)) == ((100, 140),)
    assert runs(target, DonorTokens.of(HELD), least=41) == ()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=40),
    st.lists(st.integers(0, 4), min_size=1, max_size=40),
    st.data(),
)
def test_equal_runs_are_those_that_a_loop_finds(target: list[int], donor: list[int], data: st.DataObject) -> None:
    held = DonorTokens.of(donor, donor[:3])
    source = np.array([data.draw(st.integers(0, len(held) - 1)) for _ in target])
    first, stop = equal_runs(np.array(target), held, source)
    for i in range(len(target)):
        low = high = i
        while low and _joined(target, held, source, low):
            low -= 1
        while high + 1 < len(target) and _joined(target, held, source, high + 1):
            high += 1
        assert (first[i], stop[i]) == (low, high + 1)


def _joined(target: list[int], held: DonorTokens, source: Ids, place: int) -> bool:
    """Whether a token and the one before it equal neighbours of one donor."""
    one, other = source[place - 1], source[place]
    same = held.ids[one] == target[place - 1] and held.ids[other] == target[place]
    return bool(same and other == one + 1 and held.number[one] == held.number[other])


def test_stretches_are_the_runs_of_marked_places() -> None:
    assert stretches(np.array([True, False, True, True])) == [(0, 1), (2, 4)]
    assert stretches(np.zeros(0, dtype=bool)) == []


def test_a_run_from_the_middle_of_a_prompt_is_no_opening() -> None:
    """A donor's first sentence was computed with next to nothing before it: not so a run from position 700."""
    target = np.concatenate([NEW[:10], HELD])
    for first, opening in ((0, True), (700, False)):
        donors = DonorTokens.of(HELD, first=[first])
        made = mark_forced(target, donors, mapped(target, donors), ends=np.array([HELD[9], NEW[9]]), tail=4)
        assert made.forced[10:20].all() == opening
        assert not made.forced[20:106].any()


def test_the_first_place_takes_state_from_first_places_alone() -> None:
    """There the attention sink is."""
    run = DonorTokens.of(HELD, first=[700])
    assert mark_forced(HELD, run, mapped(HELD, run), ends=EVERY_TOKEN, tail=4).forced[0]
    both = DonorTokens.of(HELD, np.concatenate([HELD[:1], NEW]), first=[700, 0])
    found = mapped(HELD, both)
    assert found.source[0] == len(HELD)
    assert not mark_forced(HELD, both, found, ends=EVERY_TOKEN, tail=4).forced[0]


def test_positions_and_rows_are_counted_apart() -> None:
    donors = DonorTokens.of([1, 2, 3], [4, 5], first=[0, 700])
    assert donors.rows.tolist() == [0, 1, 2, 0, 1]
    assert donors.positions.tolist() == [0, 1, 2, 700, 701]
    assert (donors.openings, donors.stops) == ((0,), [3, 702])
    assert (DonorTokens.of([1], [2]).openings, DonorTokens.of([1], [2]).stops) == ((0, 1), [1, 1])
