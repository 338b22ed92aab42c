"""Offsets: what computed rows show is carried on to their neighbours, and to nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dejakv.blend.offsets import PIECE, apply_corrections, corrections, offset_runs
from dejakv.blend.token_map import DonorTokens, TokenMap


def mapped(source) -> TokenMap:
    n = len(source)
    return TokenMap(np.asarray(source), np.ones(n, dtype=np.float32), np.zeros(n, dtype=np.int64))


def state(seed: int, tokens: int) -> torch.Tensor:
    return torch.randn(1, 2, tokens, 4, generator=torch.Generator().manual_seed(seed))


def test_runs_end_where_the_donor_jumps_and_leave_out_foreign_and_exact_rows():
    donors = DonorTokens.of([1, 10, 11, 12, 13], [1, 20, 21, 22])
    target = np.array([1, 10, 20, 21, 99, 11, 12])
    found = mapped([0, 1, 6, 7, 8, 2, 3])
    number = offset_runs(target, donors, found, 2)
    assert number[[0, 1, 4]].tolist() == [-1, -1, -1]
    assert number[2] == number[3]
    assert number[5] == number[6]
    assert number[2] != number[5]


def test_a_long_run_is_taken_in_pieces():
    n = 2 * PIECE + 10
    ids = np.arange(n)
    number = offset_runs(ids, DonorTokens.of(ids), mapped(ids))
    assert np.unique(number, return_counts=True)[1].tolist() == [PIECE, PIECE, 10]


def test_a_common_shift_reaches_the_rest_of_its_run_and_stops_there():
    runs = np.array([0] * 30 + [1] * 30 + [-1] * 4)
    rows = torch.arange(0, 30, 2)
    held, shift = state(1, 64), 3.0
    before = held.clone()
    apply_corrections(held, held[:, :, rows] + shift, corrections(runs, rows))
    moved = held - before
    rest = torch.arange(1, 30, 2)
    # Most of the shift: what a row has of its own counts as noise.
    assert (moved[:, :, rest] > 0.5 * shift).all()
    assert (moved[:, :, rest] < shift).all()
    assert torch.equal(held[:, :, rows], before[:, :, rows])
    assert torch.equal(held[:, :, 30:], before[:, :, 30:])


def test_near_rows_tell_more_than_far_ones():
    held = state(2, 400)
    before = held.clone()
    rows = torch.tensor([0, 1, 2])
    apply_corrections(held, held[:, :, rows] + 1.0, corrections(np.zeros(400, dtype=np.int64), rows))
    moved = (held - before)[0, 0, :, 0]
    assert (moved[3:-1] > moved[4:]).all()
    assert moved[-1] < 0.05 * moved[3]


@given(
    runs=st.lists(st.integers(-1, 3), min_size=1, max_size=40).map(sorted),
    chosen=st.sets(st.integers(0, 39), min_size=1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_that_equal_the_donors_change_nothing(runs, chosen, dtype):
    rows = torch.tensor(sorted({at % len(runs) for at in chosen}))
    held = state(3, len(runs)).to(dtype)
    before = held.clone()
    made = corrections(np.asarray(runs), rows)
    apply_corrections(held, held[:, :, rows].clone(), made)
    assert torch.equal(held, before)
    for part in made:
        assert part.weights.shape == (len(part.rest), len(part.anchors))
        assert set(part.rest.tolist()).isdisjoint(rows.tolist())
        assert rows[part.anchor_places].tolist() == part.anchors.tolist()
        assert len({runs[at] for at in (*part.rest.tolist(), *part.anchors.tolist())} - {-1}) == 1


@pytest.mark.parametrize("copies", [1, 3])
def test_a_batch_of_copies_moves_alike(copies):
    """Beams: the state of one prompt, several times."""
    held = state(4, 20).repeat(copies, 1, 1, 1)
    rows = torch.arange(5)
    apply_corrections(held, held[:, :, rows] + 1.0, corrections(np.zeros(20, dtype=np.int64), rows))
    assert (held == held[:1]).all()
    assert not torch.equal(held[:1], state(4, 20))


def test_rows_move_by_the_share_of_their_surroundings_that_changed():
    runs, rows = np.zeros(20, dtype=np.int64), torch.arange(0, 20, 2)
    held = state(5, 20)
    fresh, before = held[:, :, rows] + 2.0, held.clone()
    whole, part = held.clone(), held.clone()
    changed = np.linspace(0, 1, 20, dtype=np.float32)
    apply_corrections(whole, fresh, corrections(runs, rows))
    apply_corrections(part, fresh, corrections(runs, rows, changed))
    rest = torch.arange(1, 20, 2)
    expected = (whole - before)[:, :, rest] * torch.from_numpy(changed)[rest][:, None]
    assert torch.allclose((part - before)[:, :, rest], expected, atol=1e-5)


def test_rows_between_the_parts_of_a_piece_are_left_alone():
    runs = np.array([0] * 30)
    runs[10:14] = -1
    held = state(7, 30)
    before, rows = held.clone(), torch.tensor([2, 20])
    apply_corrections(held, held[:, :, rows] + 1.0, corrections(runs, rows))
    assert torch.equal(held[:, :, 10:14], before[:, :, 10:14])
    assert not torch.equal(held[:, :, 14:20], before[:, :, 14:20])
