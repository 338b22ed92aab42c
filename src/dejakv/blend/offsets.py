"""K and V of rows that are not computed, moved by what computed rows near them show (KVCOMM, arXiv 2510.12872).

Text that was computed behind other text has other K and V, and the difference is alike in neighbouring rows. KVCOMM keeps
anchors that tell of it; here the rows that a blend computes anyway are the anchors. What they show is carried on as the mean
of a Gaussian process: rows of one run covary by exp(-distance / REACH), each row adds noise of its own. Far from any computed
row nothing is changed, and an identical donor stays as it is. The weights follow from positions alone, so one matrix serves
all layers and heads. Keys are taken as they are rotated: neighbours are rotated almost alike.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dejakv.blend.token_map import DonorTokens, Ids, TokenMap, equal_runs

REACH = 100.0
"""Tokens over which the difference fades."""
NOISE = 4.0
"""Variance of a row's own part of the difference, relative to the part in common with its neighbours."""
PIECE = 512
"""Rows of a run treated together. It bounds the matrices: the cost grows with the prompt's length times this."""


@dataclass(frozen=True)
class OffsetCorrection:
    """For one piece: the rows `rest` move by `weights @ (difference of the rows anchors)`.

    rest     `[r]` rows of the prompt
    anchors  `[s]` rows of the prompt; `at` `[s]`: their places among the computed rows
    weights  `[r, s]` float32
    """

    rest: Tensor
    anchors: Tensor
    at: Tensor
    weights: Tensor


def runs_of(target: Ids, donors: DonorTokens, donor_map: TokenMap, exact: int = 0) -> Ids:
    """Which rows tell of each other: the number of the copied run, in pieces of at most `PIECE` rows, that each row is part of,
    `[tokens]`; -1 for a row whose state is another token's (it tells nothing) and for the first `exact` (they need no
    correction)."""
    first, _ = equal_runs(target, donors, donor_map.source)
    index = np.arange(len(donor_map))
    begins = np.maximum(first, exact)
    informative = (donors.ids[donor_map.source] == target) & (index >= exact)
    number = np.cumsum((index - begins) % PIECE == 0) - 1
    return np.where(informative, number, -1)


def corrections(runs: Ids, computed: Tensor, changed: NDArray[np.float32] | None = None) -> list[OffsetCorrection]:
    """What the computed rows (`[rows]`, ascending) say about the others, for each piece that has both.

    runs     see `runs_of`
    changed  see `Surroundings`: each token moves by this share of the difference; None: by all of it
    """
    rows = computed.cpu().numpy()
    is_computed = np.zeros(len(runs), dtype=bool)
    is_computed[rows] = True
    members = np.flatnonzero(runs >= 0)
    correction_list: list[OffsetCorrection] = []

    for piece in np.split(members, np.flatnonzero(np.diff(runs[members])) + 1):
        anchors, rest = piece[is_computed[piece]], piece[~is_computed[piece]]
        if not anchors.size or not rest.size:
            continue
        among = _covariance(anchors, anchors) + NOISE * np.eye(len(anchors))
        weights = np.linalg.solve(among, _covariance(anchors, rest)).T
        if changed is not None:
            weights *= changed[rest][:, None]

        anchor_places = np.searchsorted(rows, anchors)
        correction_list.append(
            OffsetCorrection(*(_tensor(part, computed.device) for part in (rest, anchors, anchor_places, weights)))
        )
    return correction_list


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    # Solved in float64, applied in float32.
    kind = np.float32 if array.dtype.kind == "f" else array.dtype
    return torch.from_numpy(np.ascontiguousarray(array, dtype=kind)).to(device)


def _covariance(row_places: Ids, column_places: Ids) -> NDArray[np.float64]:
    return np.exp(-np.abs(row_places[:, None] - column_places[None]) / REACH)


def correct(state: Tensor, fresh: Tensor, correction_list: list[OffsetCorrection]) -> None:
    """Moves rows of `state` `[batch, kv_heads, tokens, head_dim]` in place. `fresh`: the same of the computed rows, in their order;
    `state` still has the donor's state there."""
    for part in correction_list:
        state.index_copy_(2, part.rest, corrected(state, fresh, part))


def corrected(state: Tensor, fresh: Tensor, part: OffsetCorrection) -> Tensor:
    """What becomes of the rows `part.rest` of `state`: `[batch, kv_heads, r, head_dim]`. See `correct`."""
    # In half precision a difference of two near numbers has few digits left.
    shift = fresh.index_select(2, part.at).float() - state.index_select(2, part.anchors).float()
    before = state.index_select(2, part.rest)
    heads = before.flatten(0, 1)
    weights = part.weights.expand(len(heads), -1, -1)
    return torch.baddbmm(heads.float(), weights, shift.flatten(0, 1)).to(state.dtype).view_as(before)
