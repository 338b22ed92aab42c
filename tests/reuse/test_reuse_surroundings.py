"""What stands before a row, and what stood there: an edit changes little, a move much."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejakv.blend.maps import token_map
from dejakv.blend.recomputed import MIN_WEIGHT, NEAR, count_below, surroundings_of
from dejakv.blend.token_map import DonorTokens, TokenMap

ONE, TWO, THREE = np.arange(100, 140), np.arange(200, 260), np.arange(300, 330)


def embed(ids) -> np.ndarray:
    return np.eye(8, dtype=np.float32)[np.asarray(ids) % 8]


def around(target, donors: DonorTokens):
    return surroundings_of(target, donors, token_map("context", target, donors, embed))


def test_behind_an_edit_hardly_anything_changed() -> None:
    before = np.concatenate([ONE, TWO])
    target = before.copy()
    target[49] = 7
    found = around(target, DonorTokens.of(before))
    assert found.changed[50:] == pytest.approx(1 / 50)
    assert found.changed[:49] == pytest.approx(0.0)
    assert found.changed[49] == 1.0  # no state of its own
    assert found.behind[[0, 48, 49, 50, 60]].tolist() == [0, 48, 0, 0, 10]


def test_text_behind_other_text_has_lost_all_of_it() -> None:
    found = around(np.concatenate([ONE, TWO]), DonorTokens.of(np.concatenate([THREE, TWO])))
    assert found.changed[40:] == pytest.approx(1.0)


def test_the_longer_of_both_contexts_counts() -> None:
    """Text of which the middle was taken out kept all that stands before it, but lost what no longer does."""
    shorter, longer = np.concatenate([ONE, THREE]), np.concatenate([ONE, TWO, THREE])
    assert around(shorter, DonorTokens.of(longer)).changed[40:] == pytest.approx(60 / 100)
    assert around(longer, DonorTokens.of(shorter)).changed[100:] == pytest.approx(60 / 100)


def test_passages_that_changed_places() -> None:
    found = around(np.concatenate([ONE, THREE, TWO]), DonorTokens.of(np.concatenate([ONE, TWO, THREE])))
    assert found.changed[:40] == pytest.approx(0.0)
    assert found.changed[40:70] == pytest.approx(60 / 100)  # of the 100 tokens before it there, 40 are left
    assert found.changed[70:] == pytest.approx(30 / 70)  # 30 of the 70 tokens before it were not there


def test_a_donor_knows_a_beginning_that_the_map_took_from_another() -> None:
    """The exact prefix may come from any of the prompts that begin alike."""
    donors = DonorTokens.of(ONE, np.concatenate([ONE, [7], TWO]))
    target = np.concatenate([ONE, [8], TWO])
    source = np.concatenate([np.arange(40), [80], 40 + 41 + np.arange(60)])
    found = TokenMap(source, np.ones(101, np.float32), np.zeros(101, np.int64))
    assert surroundings_of(target, donors, found).changed[41:] == pytest.approx(1 / 41)


def test_rows_of_a_prompt_whose_beginning_is_unknown_count_as_moved() -> None:
    donors = DonorTokens.of(TWO, first=[40])
    assert around(np.concatenate([ONE, TWO]), donors).changed[40:] == pytest.approx(1.0)


def test_rows_near_a_small_change_are_worth_most_and_moved_ones_all_the_same() -> None:
    before = np.concatenate([ONE, TWO])
    edited = before.copy()
    edited[20] = 7
    worth = around(edited, DonorTokens.of(before)).worth
    assert (np.diff(worth[21:]) <= 0).all()
    assert worth[21] > 0.9 > worth[21 + round(NEAR)] > worth[-1] > MIN_WEIGHT
    moved = around(np.concatenate([ONE, TWO]), DonorTokens.of(np.concatenate([THREE, TWO]))).worth
    assert moved[40:] == pytest.approx(1.0)


@given(st.data())
def test_shares_and_worths_are_shares(data: st.DataObject) -> None:
    """Any map, also one that points anywhere."""
    token = st.integers(0, 5)
    donors = [data.draw(st.lists(token, min_size=1, max_size=30)) for _ in range(data.draw(st.integers(1, 3)))]
    first = [data.draw(st.integers(0, 40)) for _ in donors]
    among = DonorTokens.of(*donors, first=first)
    target = np.array(data.draw(st.lists(token, min_size=1, max_size=40)))
    source = np.array([data.draw(st.integers(0, len(among) - 1)) for _ in target])
    found = surroundings_of(
        target, among, TokenMap(source, np.ones(len(target), np.float32), np.zeros(len(target), np.int64))
    )
    assert ((found.changed >= 0) & (found.changed <= 1)).all()
    assert ((found.worth > 0) & (found.worth <= 1)).all()
    assert (found.changed[among.ids[source] != target] == 1).all()
    assert (found.behind >= 0).all()


@given(st.data())
def test_values_below_a_limit_are_counted_as_one_by_one(data: st.DataObject) -> None:
    values = np.array(data.draw(st.lists(st.integers(0, 40))), dtype=np.int64)
    queries = data.draw(st.lists(st.tuples(st.integers(0, len(values)), st.integers(0, 50)), min_size=1))
    stops, limits = np.array(queries, dtype=np.int64).T
    expected = [int((values[:stop] < limit).sum()) for stop, limit in queries]
    assert count_below(values, stops, limits).tolist() == expected
