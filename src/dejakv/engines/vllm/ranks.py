"""Tensor parallelism: every rank computes and stores some of the heads, in its own process.

Each rank has a folder. A state is there only if every rank has its part: it is indexed when the
last rank has confirmed it, and what one rank lost is a miss for all. A load that fails on one rank
fails as a whole (vLLM's `KVOutputAggregator` sees to the blocks).

Forwards of blends meet in collectives, so that all ranks must compute the same rows in the same
step. What one rank alone knows (a state that it could not read, weights that changed, an error) is
told to all ranks before it decides anything (`SingleRank`). A blend begins when all ranks have
fetched what it starts from, and all from the same (`UnderWay`). With a single rank it begins by
itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
import torch.distributed

from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.settings import is_memory

Answer = TypeVar("Answer")


def rank_count(vllm_config: Any) -> int:
    """Return the number of ranks that hold a part of each state."""
    return int(vllm_config.parallel_config.tensor_parallel_size)


def is_apart(vllm_config: Any) -> bool:
    """Tell whether the worker is in another process, which shares no memory with the scheduler."""
    return vllm_config.parallel_config.distributed_executor_backend not in (None, "uni")


def settings_of_rank(settings: ConnectorSettings, rank: int, ranks: int) -> ConnectorSettings:
    """Return one rank's settings.

    Its place is below `store` and `disk_dir`, and it has a share of common budgets. A single rank
    has all.
    """
    if ranks == 1:
        return settings

    def below(place: str | None) -> str | None:
        return (
            f"{place.rstrip('/')}/tp-{rank}-of-{ranks}" if place and not is_memory(place) else place
        )

    def share(limit: int) -> int:
        return max(1, limit // ranks) if limit else 0

    # Budgets are per server, and every rank stores an equal part of each state.
    return replace(
        settings,
        store=below(settings.store),
        disk_dir=below(settings.disk_dir),
        disk_bytes=share(settings.disk_bytes),
        max_bytes=share(settings.max_bytes),
        memory_bytes=share(settings.memory_bytes),
        max_write_rate=share(settings.max_write_rate),
        max_pending_bytes=share(settings.max_pending_bytes),
        pinned_bytes=share(settings.pinned_bytes),
    )


class RankAnswers(Generic[Answer]):
    """Collects the ranks' answers to orders, which may come in different steps."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._incomplete: dict[str, list[Answer]] = {}

    def add(self, order: str, answer: Answer) -> list[Answer] | None:
        """Add a rank's answer to an order. Each rank answers each order once.

        Returns
        -------
        list or None
            All answers with the last one, None before.
        """
        answers = self._incomplete.setdefault(order, [])
        answers.append(answer)
        return self._incomplete.pop(order) if len(answers) == self._ranks else None


NOT_ALIKE = "the ranks do not hold the same of the donors' state"
ABANDONED = "the request ended before its blend"


@dataclass
class UnderWay:
    """Blends under way and their remaining rows. For the engine loop alone.

    A rank that failed costs the blend on all ranks. Once a blend has begun, only its end or `drop`
    ends it.

    Attributes
    ----------
    ranks : int
        Workers that each blend their part of the heads.
    rows : dict[str, int]
        Rows left in each blend, by request; 0 until all ranks have fetched its draft.
    """

    ranks: int
    rows: dict[str, int] = field(default_factory=dict[str, int])
    _begin: list[str] = field(default_factory=list[str])
    _drop: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        self._answers = RankAnswers[str](self.ranks)

    def ordered(self, request_id: str) -> None:
        """Note a blend that the worker is to make."""
        self.rows[request_id] = 0

    def remain(self, rows: dict[str, int]) -> None:
        """Note a rank's report of the rows left in blends whose drafts it has fetched."""
        for request_id, count in rows.items():
            # Until all ranks have fetched the draft no step keeps room for its rows.
            if request_id in self.rows and (self.ranks == 1 or self.rows[request_id]):
                self.rows[request_id] = count

    def fetched(self, request_id: str, mark: str) -> None:
        """Note that a rank has fetched a blend's draft, or has failed to.

        Parameters
        ----------
        request_id : str
            The blend's request.
        mark : str
            `BlendDraft.mark` of the draft, empty after a failure. A single rank sends none.
        """
        marks = self._answers.add(request_id, mark)
        if marks is None:
            return

        # With different rows the ranks would meet in different collectives.
        if all(mark == marks[0] != "" for mark in marks):
            self._begin.append(request_id)
            # At least a row is left; the next report says how many.
            self.rows[request_id] = 1
        else:
            self._drop[request_id] = NOT_ALIKE

    def abandoned(self, request_id: str) -> None:
        """Drop the blend of a finished request, whose rows would serve nobody."""
        if request_id in self.rows:
            self._drop[request_id] = ABANDONED

    def ended(self, request_id: str) -> None:
        """Forget a blend that all ranks have reported as over."""
        self.rows.pop(request_id, None)

    def orders(self) -> tuple[list[str], dict[str, str]]:
        """Take the requests that all ranks begin in this step, and those to drop, with reasons.

        Each request is returned once.
        """
        begin, self._begin = self._begin, []
        drop, self._drop = self._drop, {}
        return begin, drop


class SingleRank:
    """Agreement of all ranks; this class is for a single rank.

    All ranks call it in the engine loop, in the same order.
    """

    ranks = 1

    def all_agree(self, votes: Sequence[bool]) -> list[bool]:
        """Return for each question whether all ranks say yes."""
        return list(votes)

    def maximum(self, value: float) -> float:
        """Return the greatest of the ranks' values; infinity if a rank has no number."""
        return value

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' values, on the device of the given ones."""
        return values

    def broadcast_first(self, values: torch.Tensor) -> torch.Tensor:
        """Return the first rank's values, on the device of the given ones."""
        return values


ALONE = SingleRank()


class RankGroup(SingleRank):
    """Agreement of several ranks.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The ranks' process group, of CPU tensors.
    """

    def __init__(self, group: Any) -> None:
        self.ranks = torch.distributed.get_world_size(group)
        self._group = group
        self._first = torch.distributed.get_global_rank(group, 0)

    def all_agree(self, votes: Sequence[bool]) -> list[bool]:
        """Return for each question whether all ranks say yes: the minimum of the votes."""
        flags = torch.tensor(list(votes), dtype=torch.int32)
        self._all(flags, torch.distributed.ReduceOp.MIN)

        return [bool(flag) for flag in flags.tolist()]

    def maximum(self, value: float) -> float:
        """Return the greatest of the ranks' values; infinity if a rank has no number."""
        # What a maximum makes of NaN may differ by rank, and all must decide alike.
        host_value = torch.tensor([value], dtype=torch.float64).nan_to_num(nan=torch.inf)
        self._all(host_value, torch.distributed.ReduceOp.MAX)
        return float(host_value)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' values, element by element, on the device of `values`."""
        host_values = _host_copy(values)
        self._all(host_values, torch.distributed.ReduceOp.SUM)
        return host_values.to(values.device)

    def broadcast_first(self, values: torch.Tensor) -> torch.Tensor:
        """Return the first rank's values, sent through host memory."""
        host_values = _host_copy(values)
        self._from_first(host_values)
        return host_values.to(values.device)

    def _all(self, values: torch.Tensor, how: Any) -> None:
        torch.distributed.all_reduce(values, how, self._group)

    def _from_first(self, values: torch.Tensor) -> None:
        torch.distributed.broadcast(values, self._first, self._group)


def _host_copy(values: torch.Tensor) -> torch.Tensor:
    # The group takes CPU tensors alone and writes into them: not into those of the caller.
    return values.to("cpu", copy=True).contiguous()
