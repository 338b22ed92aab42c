"""Turns rotated keys to other positions, as each layer of the served model rotates them."""

from collections.abc import Sequence
from typing import Any

import torch

from dejakv.blend.rope import turn
from dejakv.blend.slices import sliced
from dejakv.engines.vllm import upstream
from dejakv.errors import ModelError


class Rotary:
    """The rotary tables of a model's layers, in order (`upstream.rotary_tables`).

    Whether the model rotates its keys in the way that follows from them is not to be seen here: `model_check` computes it.
    """

    def __init__(self, tables: Sequence[tuple[torch.Tensor, bool]]) -> None:
        self.tables = tuple(tables)

    @classmethod
    def of(cls, model: torch.nn.Module, attention: Sequence[Any]) -> "Rotary":
        """Tables of the modules that hold the attention layers. Raises: ModelError if one has no rotary table."""
        found: list[tuple[torch.Tensor, bool]] = []
        for number, table in enumerate(upstream.rotary_tables(model, attention)):
            if table is None:
                raise ModelError(
                    f"blend is not possible: layer {number} of {type(model).__name__} has no rotary table, so keys cannot be"
                    " moved. Leave blend out of mode and modes (`dejakv run`: --reuse exact or adopt)"
                )
            found.append(table)
        return cls(found)

    def move(self, keys: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Turns all layers' cached keys `[layers, kv_heads, n, head_dim]` of positions `source` to positions `target`, in
        place. What does not move stays bit for bit."""
        rows = (source != target).nonzero().squeeze(1)
        if not len(rows):
            return
        source, target = source[rows], target[rows]
        runs, others = sliced(rows.cpu().numpy())
        slices = [(slice(begin, end), slice(int(rows[begin]), int(rows[begin]) + end - begin)) for begin, end in runs]
        apart = torch.from_numpy(others).to(rows.device)
        scattered = rows[apart]
        turns: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # most models have one table for all layers
        for (table, halves), mine in zip(self.tables, keys, strict=True):
            if id(table) not in turns:
                turns[id(table)] = _turn(table, source, target)
            cos, sin = turns[id(table)]
            for run, there in slices:
                _turn_keys(halves, mine[:, there], cos[run], sin[run])
            if len(apart):
                some = mine[:, scattered]
                _turn_keys(halves, some, cos[apart], sin[apart])
                mine[:, scattered] = some


def _turn(table: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    table = table.float()
    half = table.shape[-1] // 2
    there, here = table[target], table[source]
    return turn((there[:, :half], there[:, half:]), (here[:, :half], here[:, half:]))


def _turn_keys(halves: bool, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """In place, in float32. `halves`: a number and its partner lie half a head apart, else side by side."""
    turning = keys[..., : 2 * cos.shape[-1]]
    wide = turning.float()  # of float32 itself
    one, other = wide.chunk(2, dim=-1) if halves else (wide[..., 0::2], wide[..., 1::2])
    crossed = one * sin
    one.mul_(cos).addcmul_(other, sin, value=-1.0)
    other.mul_(cos).add_(crossed)
    if turning.dtype != wide.dtype:
        turning.copy_(wide)
