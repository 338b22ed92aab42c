"""The rotary tables of a model's layers, by which cached keys move to other positions."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from dejakv.blend.rope import turn
from dejakv.blend.slices import split_runs
from dejakv.engines.vllm import upstream
from dejakv.errors import ModelError


class LayerRotaryTables:
    """The rotary tables of a model's layers, in order (`upstream.rotary_tables`).

    Whether the model rotates its keys in the way that follows from the tables is not to be seen
    here; `ModelCheck` computes it.
    """

    def __init__(self, tables: Sequence[tuple[torch.Tensor, bool]]) -> None:
        self.tables = tuple(tables)

    @classmethod
    def from_model(cls, model: torch.nn.Module, attention: Sequence[Any]) -> "LayerRotaryTables":
        """Take the tables of the modules that hold the attention layers.

        Raises
        ------
        ModelError
            A layer has no rotary table.
        """
        tables: list[tuple[torch.Tensor, bool]] = []
        for number, table in enumerate(upstream.rotary_tables(model, attention)):
            if table is None:
                raise ModelError(
                    f"blend is not possible: layer {number} of {type(model).__name__} has no "
                    "rotary table, so keys cannot be"
                    " moved. Leave blend out of mode and modes (`dejakv run`: --reuse exact or "
                    "adopt)"
                )
            tables.append(table)
        return cls(tables)

    def move(self, keys: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Turn all layers' cached keys from positions `source` to positions `target`, in place.

        What does not move stays bit for bit.

        Parameters
        ----------
        keys : Tensor, shape [layers, kv_heads, n, head_dim]
            Rotated keys.
        source, target : Tensor, shape [n]
            Positions before and after.
        """
        if keys.device.type != "cpu":
            by_token = self.moved(keys.permute(2, 0, 1, 3), source, target)
            keys.copy_(by_token.permute(1, 2, 0, 3))
            return

        rows = (source != target).nonzero().squeeze(1)
        if not len(rows):
            return

        source, target = source[rows], target[rows]
        # Runs are turned in place; only single rows need a gather and a scatter.
        runs, single_indexes = split_runs(rows.cpu().numpy())
        slices = [
            (slice(begin, end), slice(int(rows[begin]), int(rows[begin]) + end - begin))
            for begin, end in runs
        ]
        singles = torch.from_numpy(single_indexes).to(rows.device)
        single_rows = rows[singles]
        # Most models have one table for all layers.
        turns: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        for (table, neox_style), layer_keys in zip(self.tables, keys, strict=True):
            if id(table) not in turns:
                turns[id(table)] = _turn(table, source, target)

            cos, sin = turns[id(table)]
            for run, key_rows in slices:
                _turn_keys(neox_style, layer_keys[:, key_rows], cos[run], sin[run])
            if len(singles):
                single_keys = layer_keys[:, single_rows]
                _turn_keys(neox_style, single_keys, cos[singles], sin[singles])
                layer_keys[:, single_rows] = single_keys

    def moved(self, keys: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return keys as `move` leaves them, made in one batch for all layers.

        That takes a few large operations, and memory for the keys in float32.

        Parameters
        ----------
        keys : Tensor, shape [n, layers, kv_heads, head_dim]
            Rotated keys.
        source, target : Tensor, shape [n]
            Positions before and after.
        """
        turned, begin = keys.clone(), 0
        # Most models have one table for all layers; others have a few in turns.
        for _, tables in groupby(self.tables, key=lambda table: (id(table[0]), table[1])):
            group = list(tables)
            table, neox_style = group[0]
            cos, sin = (part[:, None, None] for part in _turn(table, source, target))
            _turn_keys(neox_style, turned[:, begin : begin + len(group)], cos, sin)
            begin += len(group)
        return torch.where((source != target).view(-1, 1, 1, 1), turned, keys)


def _turn(
    table: torch.Tensor, source: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    half = table.shape[-1] // 2
    target_angles, source_angles = table[target].float(), table[source].float()
    return turn(
        (target_angles[:, :half], target_angles[:, half:]),
        (source_angles[:, :half], source_angles[:, half:]),
    )


def _turn_keys(neox_style: bool, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn a layer's keys in place, in float32.

    `neox_style`: a number and its partner lie half a head apart, else side by side.
    """
    # Some models rotate only the first numbers of a head.
    turning = keys[..., : 2 * cos.shape[-1]]
    # A view if the keys are float32: the turn is then in place.
    wide = turning.float()
    numbers, partners = wide.chunk(2, dim=-1) if neox_style else (wide[..., 0::2], wide[..., 1::2])
    # Needed by the second half, and the next line overwrites its factor.
    number_sines = numbers * sin
    numbers.mul_(cos).addcmul_(partners, sin, value=-1.0)
    partners.mul_(cos).add_(number_sines)
    if turning.dtype != wide.dtype:
        turning.copy_(wide)
