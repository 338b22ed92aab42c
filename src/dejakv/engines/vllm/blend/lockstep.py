"""What the ranks of a tensor-parallel engine agree on while they compute rows of blends.

Their forwards meet in collectives, so that all must compute the same rows in the same step. What one rank alone knows (a state that
it could not read, weights that changed, an error) is told to all before it decides anything. A single rank agrees with itself.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed


class Lockstep(Protocol):
    """To be called by all ranks, in the engine loop, in the same order."""

    ranks: int

    def each(self, fine: Sequence[bool]) -> list[bool]:
        """Of each question, whether all ranks say yes."""
        ...

    def most(self, value: float) -> float:
        """The greatest of the ranks' values; infinity if one has no number."""
        ...

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' values, on the device of the given ones."""
        ...

    def of_first(self, values: torch.Tensor) -> torch.Tensor:
        """The first rank's values, on the device of the given ones."""
        ...


class Alone:
    """One rank."""

    ranks = 1

    def each(self, fine: Sequence[bool]) -> list[bool]:
        return list(fine)

    def most(self, value: float) -> float:
        return value

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def of_first(self, values: torch.Tensor) -> torch.Tensor:
        return values


ALONE: Lockstep = Alone()


class Ranks:
    """Several ranks. `group`: their process group, of CPU tensors."""

    def __init__(self, group: Any) -> None:
        self.ranks = torch.distributed.get_world_size(group)
        self._group = group
        self._first = torch.distributed.get_global_rank(group, 0)

    def each(self, fine: Sequence[bool]) -> list[bool]:
        flags = torch.tensor(list(fine), dtype=torch.int32)
        self._all(flags, torch.distributed.ReduceOp.MIN)
        return [bool(flag) for flag in flags.tolist()]

    def most(self, value: float) -> float:
        there = torch.tensor([value], dtype=torch.float64).nan_to_num(nan=torch.inf)
        self._all(there, torch.distributed.ReduceOp.MAX)
        return float(there)

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        there = values.cpu()
        self._all(there, torch.distributed.ReduceOp.SUM)
        return there.to(values.device)

    def of_first(self, values: torch.Tensor) -> torch.Tensor:
        there = values.cpu().contiguous()
        self._from_first(there)
        return there.to(values.device)

    def _all(self, values: torch.Tensor, how: Any) -> None:
        torch.distributed.all_reduce(values, how, self._group)

    def _from_first(self, values: torch.Tensor) -> None:
        torch.distributed.broadcast(values, self._first, self._group)
