"""Corrections of a blend's rows (`blend.offsets`) as numbers for a kernel."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from dejakv.blend.offsets import OffsetCorrection

TILE = 64
"""Corrected rows that a program of the kernel takes, of one head."""


class CorrectionTable(NamedTuple):
    """Corrections of several pieces, on the device.

    Attributes
    ----------
    weights : Tensor, float32
        Weights of all pieces, each `[r, s]`, one behind the other.
    tiles : Tensor, shape [tiles, 5], int64
        Of at most `TILE` rows of one piece: the first one and their number, the first anchor and
        their number, and the first weight.
    rest, slots : Tensor, shape [rows], int64
        Rows that move, and their slots in the KV cache.
    anchors, places : Tensor, shape [anchors], int64
        Computed rows of the prompt, and their places among all of these.
    """

    weights: torch.Tensor
    tiles: torch.Tensor
    rest: torch.Tensor
    slots: torch.Tensor
    anchors: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(
        cls,
        moves: Sequence[OffsetCorrection],
        slots: torch.Tensor,
        upload: Callable[[torch.Tensor], torch.Tensor],
    ) -> "CorrectionTable":
        """Join corrections in host memory, whose rows have these slots, and upload them."""
        tiles: list[tuple[int, ...]] = []
        first_row = first_anchor = first_weight = 0
        for move in moves:
            rows, anchors = move.weights.shape
            for begin in range(0, rows, TILE):
                count, weight = min(TILE, rows - begin), first_weight + begin * anchors
                tiles.append((first_row + begin, count, first_anchor, anchors, weight))
            first_row, first_anchor = first_row + rows, first_anchor + anchors
            first_weight += rows * anchors

        # In one piece, since each copy costs as much as a launch.
        numbers = [
            torch.tensor(tiles).flatten(),
            torch.cat([move.rest for move in moves]),
            slots,
            torch.cat([move.anchors for move in moves]),
            torch.cat([move.anchor_places for move in moves]),
        ]
        parts = upload(torch.cat(numbers)).split([len(each) for each in numbers])
        weights = upload(torch.cat([move.weights.flatten() for move in moves]))
        return cls(weights, parts[0].view(-1, 5), *parts[1:])
