"""Offsets: K and V of rows that are not computed, moved by what computed rows near them show.

The idea is KVCOMM's (arXiv 2510.12872). Text that was computed behind other text has other K and V,
and the difference is alike in neighbouring rows. KVCOMM stores anchors that tell of it. Here the
rows that a blend computes anyway are the anchors. What they show is carried on as the mean of a
Gaussian process: rows of one run covary by exp(-distance / REACH), and each row adds noise of its
own. Far from any computed row nothing is changed, and an identical donor stays as it is. The
weights follow from positions alone, so one matrix serves all layers and heads. Keys are taken as
they are rotated, since neighbours are rotated almost alike.
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
"""Variance of a row's own part of the difference, relative to the part shared with neighbours."""
PIECE = 512
"""Rows of a run treated together, which bounds the matrices.

The cost grows with the prompt's length times this.
"""


@dataclass(frozen=True)
class OffsetCorrection:
    """Correction of one piece: rows `rest` move by `weights @ (fresh - state)` of rows `anchors`.

    Attributes
    ----------
    rest : Tensor, shape [r]
        Rows of the prompt that move.
    anchors : Tensor, shape [s]
        Computed rows of the prompt.
    anchor_places : Tensor, shape [s]
        Places of the anchors among the computed rows.
    weights : Tensor, shape [r, s]
        Weights, float32.
    """

    rest: Tensor
    anchors: Tensor
    anchor_places: Tensor
    weights: Tensor


def offset_runs(target: Ids, donors: DonorTokens, donor_map: TokenMap, exact: int = 0) -> Ids:
    """Return which rows tell of each other.

    Parameters
    ----------
    target : Ids, shape [tokens]
        Tokens of the prompt.
    donors : DonorTokens
        Tokens of the donors.
    donor_map : TokenMap
        Token map of the prompt.
    exact : int
        Tokens of the exact prefix, which need no correction.

    Returns
    -------
    Ids, shape [tokens]
        Number of the copied run, in pieces of at most `PIECE` rows, that each row is part of. It is
        -1 for a row of the exact prefix, and for one whose state is another token's, which tells
        nothing.
    """
    first, _ = equal_runs(target, donors, donor_map.source)
    index = np.arange(len(donor_map))
    begins = np.maximum(first, exact)
    informative = (donors.ids[donor_map.source] == target) & (index >= exact)
    # Counted up where a run begins, and every PIECE rows behind that.
    number = np.cumsum((index - begins) % PIECE == 0) - 1
    return np.where(informative, number, -1)


def corrections(
    runs: Ids, computed: Tensor, changed: NDArray[np.float32] | None = None
) -> list[OffsetCorrection]:
    """Compute what the computed rows say about the others, for each piece that has both.

    Parameters
    ----------
    runs : Ids, shape [tokens]
        Runs of the rows (see `offset_runs`).
    computed : Tensor, shape [rows]
        Computed rows, ascending.
    changed : float32 array, shape [tokens], optional
        Share of the difference by which each token moves (see `TextSurroundings`). None for all of
        it.
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
        weights = _weights(anchors, rest)
        if changed is not None:
            weights *= changed[rest][:, None]

        anchor_places = np.searchsorted(rows, anchors)
        correction_list.append(
            OffsetCorrection(
                *(
                    _tensor(part, computed.device)
                    for part in (rest, anchors, anchor_places, weights)
                )
            )
        )
    return correction_list


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    # Solved in float64, applied in float32.
    kind = np.float32 if array.dtype.kind == "f" else array.dtype
    return torch.from_numpy(np.ascontiguousarray(array, dtype=kind)).to(device)


def _weights(anchors: Ids, rest: Ids) -> NDArray[np.float64]:
    """Return `C(rest, anchors) @ inverse(C(anchors, anchors) + NOISE)`, `[r, s]`.

    Such a process has no memory: of all anchors without noise, the two around a row tell all of it.
    So the inverse `Q` of their covariance has three diagonals, and `C(rest, anchors) @ Q` two
    entries in a row. The inverse of `1 + NOISE * Q` does the rest.
    """
    fades = np.exp(-np.diff(anchors) / REACH)
    left = 1.0 / (1.0 - fades**2)
    precision = np.zeros((len(anchors), len(anchors)))
    places = np.arange(len(anchors))
    precision[places, places] = np.append(left, 1.0) + np.append(1.0, left) - 1.0
    precision[places[:-1], places[1:]] = precision[places[1:], places[:-1]] = -fades * left
    spread = np.linalg.inv(np.eye(len(anchors)) + NOISE * precision)

    # The anchors around each row; before the first and behind the last there is one.
    after = np.searchsorted(anchors, rest)
    before, last = after - 1, len(anchors) - 1
    from_before = np.where(before >= 0, np.exp((anchors[before] - rest) / REACH), 0.0)
    from_after = np.exp((rest - anchors[np.minimum(after, last)]) / REACH)
    from_after[after > last] = 0.0
    fade = from_before * from_after
    share = 1.0 / (1.0 - fade**2)
    of_before = share * (from_before - fade * from_after)
    of_after = share * (from_after - fade * from_before)
    return (
        of_before[:, None] * spread[np.maximum(before, 0)]
        + of_after[:, None] * spread[np.minimum(after, last)]
    )


def apply_corrections(
    state: Tensor, fresh: Tensor, correction_list: list[OffsetCorrection]
) -> None:
    """Move rows of `state` in place.

    Parameters
    ----------
    state : Tensor, shape [batch, kv_heads, tokens, head_dim]
        State in which the computed rows still have the donor's.
    fresh : Tensor, shape [batch, kv_heads, rows, head_dim]
        Newly computed state of the computed rows, in their order.
    correction_list : list[OffsetCorrection]
        Corrections to apply (see `corrections`).
    """
    for part in correction_list:
        state.index_copy_(2, part.rest, corrected(state, fresh, part))


def corrected(state: Tensor, fresh: Tensor, part: OffsetCorrection) -> Tensor:
    """Return the corrected rows `part.rest` of `state`, `[batch, kv_heads, r, head_dim]`.

    The arguments are those of `apply_corrections`.
    """
    # In half precision a difference of two near numbers has few digits left.
    shift = (
        fresh.index_select(2, part.anchor_places).float()
        - state.index_select(2, part.anchors).float()
    )

    before = state.index_select(2, part.rest)
    heads = before.flatten(0, 1)
    weights = part.weights.expand(len(heads), -1, -1)
    return (
        torch.baddbmm(heads.float(), weights, shift.flatten(0, 1)).to(state.dtype).view_as(before)
    )
