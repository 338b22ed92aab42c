"""Rows of a state copied from places to places: long runs as slices, which is several times as fast as row by row."""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dejakv.blend.token_map import Ids

SLICED = 32
"""Rows from which on a run is worth a slice of its own."""

GAP = 16
"""Rows that are read in vain rather than left out between two ranges."""


def contiguous(places: Ids, group: Ids | None = None) -> list[tuple[int, int]]:
    """Begin and end of each run of consecutive places (of one `group`), as indices into them."""
    cut = np.diff(places) != 1
    if group is not None:
        cut |= np.diff(group) != 0
    return list(pairwise([0, *(np.flatnonzero(cut) + 1).tolist(), len(places)]))


def sliced(places: Ids, group: Ids | None = None) -> tuple[list[tuple[int, int]], Ids]:
    """The runs of at least `SLICED` consecutive places (of one `group`), as `contiguous` gives them, and the indices of all other
    places."""
    runs = [(begin, end) for begin, end in contiguous(places, group) if end - begin >= SLICED]
    is_scattered = np.ones(len(places), dtype=bool)
    for begin, end in runs:
        is_scattered[begin:end] = False
    return runs, np.flatnonzero(is_scattered)


def ranges_of(places: Ids) -> list[tuple[int, int]]:
    """Ranges `[start, stop)` around these places, ascending. Gaps below `GAP` are filled."""
    unique_places = np.unique(places)
    if not unique_places.size:
        return []
    cuts = np.flatnonzero(np.diff(unique_places) > GAP)
    starts, stops = unique_places[np.append(0, cuts + 1)], unique_places[np.append(cuts, len(unique_places) - 1)] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def copy_part(part: Tensor, first: int, places: Ids, into: Tensor, rows: Ids) -> int:
    """As `copy_rows`, from a part of a state that holds its tokens from `first` on: those that it has, and how many these are."""
    in_part = (places >= first) & (places < first + part.shape[3])
    copy_rows(part, places[in_part] - first, into, rows[in_part])
    return int(in_part.sum())


def copy_rows(state: Tensor, places: Ids, into: Tensor, rows: Ids) -> None:
    """Copies the tokens of `state` at `places` to the `rows` of `into`. Both are `[2, layers, kv_heads, tokens, head_dim]`; their
    devices and types may differ."""
    # One run in both: consecutive rows from consecutive places.
    runs, scattered = sliced(rows, rows - places)
    for begin, end in runs:
        target_start, source_start = int(rows[begin]), int(places[begin])
        into[:, :, :, target_start : target_start + end - begin] = state[
            :, :, :, source_start : source_start + end - begin
        ]
    if len(scattered):
        row_index = torch.from_numpy(rows[scattered]).to(into.device)
        source = torch.from_numpy(places[scattered]).to(state.device)
        for part, layer_state in zip(
            into.flatten(0, 1), state.flatten(0, 1), strict=True
        ):  # small copies stay in caches
            part.index_copy_(1, row_index, layer_state.index_select(1, source).to(part))
