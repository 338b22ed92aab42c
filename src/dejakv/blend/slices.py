"""Rows of a state copied from places to places, long runs as slices.

Slices are several times as fast as row by row.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dejakv.blend.token_map import Ids, sorted_unique

SLICED = 32
"""Rows from which on a run is worth a slice of its own."""

GAP = 16
"""Rows of a gap from which on two ranges are read apart; those of a smaller gap are read too."""


def contiguous(places: Ids, group: Ids | None = None) -> list[tuple[int, int]]:
    """Return begin and end of each run of consecutive places (of one `group`), as their indices."""
    cut = np.diff(places) != 1
    if group is not None:
        cut |= np.diff(group) != 0
    return list(pairwise([0, *(np.flatnonzero(cut) + 1).tolist(), len(places)]))


def split_runs(places: Ids, group: Ids | None = None) -> tuple[list[tuple[int, int]], Ids]:
    """Split places into long runs and others.

    Returns
    -------
    list[tuple[int, int]]
        Runs of at least `SLICED` consecutive places (of one `group`), as from `contiguous`.
    Ids
        Indices of all other places.
    """
    runs = [(begin, end) for begin, end in contiguous(places, group) if end - begin >= SLICED]
    is_scattered = np.ones(len(places), dtype=bool)
    for begin, end in runs:
        is_scattered[begin:end] = False
    return runs, np.flatnonzero(is_scattered)


def ranges_of(places: Ids) -> list[tuple[int, int]]:
    """Return ranges `[start, stop)` around these places, ascending. Gaps below `GAP` are filled."""
    unique_places = sorted_unique(places)
    if not unique_places.size:
        return []
    cuts = np.flatnonzero(np.diff(unique_places) > GAP)
    starts, stops = (
        unique_places[np.append(0, cuts + 1)],
        unique_places[np.append(cuts, len(unique_places) - 1)] + 1,
    )
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def copy_part(part: Tensor, first: int, places: Ids, into: Tensor, rows: Ids) -> int:
    """Copy rows from a part of a state, as `copy_rows` does, and return how many were copied.

    Parameters
    ----------
    part : Tensor, shape [2, layers, kv_heads, tokens, head_dim]
        Tokens of the state from `first` on.
    first : int
        Place of the part's first token.
    places : Ids
        Places in the whole state. Only those within the part are copied.
    into : Tensor
        State that gets the rows.
    rows : Ids
        Rows of `into`, one for each place.
    """
    in_part = (places >= first) & (places < first + part.shape[3])
    copy_rows(part, places[in_part] - first, into, rows[in_part])
    return int(in_part.sum())


def copy_rows(state: Tensor, places: Ids, into: Tensor, rows: Ids) -> None:
    """Copy the tokens of `state` at `places` to the `rows` of `into`.

    Both are `[2, layers, kv_heads, tokens, head_dim]`. Their devices and types may differ.
    """
    # One run in both: consecutive rows from consecutive places.
    runs, scattered = split_runs(rows, rows - places)
    for begin, end in runs:
        target_start, source_start = int(rows[begin]), int(places[begin])
        into[:, :, :, target_start : target_start + end - begin] = state[
            :, :, :, source_start : source_start + end - begin
        ]
    if len(scattered):
        row_index = torch.from_numpy(rows[scattered]).to(into.device)
        source = torch.from_numpy(places[scattered]).to(state.device)
        # Layer by layer: small copies stay in the processor's caches.
        for part, layer_state in zip(into.flatten(0, 1), state.flatten(0, 1), strict=True):
            part.index_copy_(1, row_index, layer_state.index_select(1, source).to(part))
