"""Top-layer reuse in an LCKV model: donors' rows into a cache, hits and misses as batches, state handed out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dejakv.engines.transformers.top_layer import moved_rows
from dejakv.errors import ModelError
from dejakv.models.lckv.cache import KV, GivenRows, LCKVCache, held
from dejakv.models.lckv.modeling import LCKVLlamaForCausalLM
from dejakv.reuse.top_layer import TakenRows
from dejakv.sim_llm.entry import TaskCacheEntry


@dataclass(frozen=True)
class Task:
    """One prompt of a batch, and whose state it takes; without, all of it is computed."""

    token_ids: tuple[int, ...]
    donor: TaskCacheEntry | None = None
    plan: TakenRows | None = None


class TopLayerReuse:
    """Runs an LCKV model over batches of tasks that are all hits or all misses."""

    def __init__(self, model: LCKVLlamaForCausalLM) -> None:
        self.model, self.layout = model, model.model.layout

    def prepare(self, tasks: Sequence[Task], pad: int) -> dict[str, Any]:
        """What `generate` takes: ids and mask padded on the left, and a cache with the donors' rows.

        pad  id that fills shorter prompts. Raises: ModelError for a donor of another model
        """
        longest = max(len(task.token_ids) for task in tasks)
        blank = [longest - len(task.token_ids) for task in tasks]
        device = self.model.device
        ids = [[pad] * left + list(task.token_ids) for left, task in zip(blank, tasks, strict=True)]
        mask = [[0] * left + [1] * (longest - left) for left in blank]
        given = self._given(tasks, blank, longest) if tasks[0].donor is not None else None
        return {
            "input_ids": torch.tensor(ids, device=device),
            "attention_mask": torch.tensor(mask, device=device),
            "past_key_values": LCKVCache(self.layout, given),
        }

    def state(self, cache: LCKVCache, row: int, tokens: int, longest: int) -> KV:
        """Keys and values [layers, kv heads, tokens, dim] that a similar task may take, of one prompt of a batch; copies."""
        parts: list[list[torch.Tensor]] = [[], []]
        for layer in self.layout.task_layers:
            kv = held(cache, layer)
            assert kv is not None
            for part, tensor in zip(parts, kv, strict=True):
                part.append(tensor[row, :, longest - tokens : longest])
        return torch.stack(parts[0]), torch.stack(parts[1])

    def _given(self, tasks: Sequence[Task], blank: list[int], longest: int) -> GivenRows:
        """All tasks' rows [batch, heads, longest, dim]. As many rows are computed in each as the neediest task asks for."""
        computed = [task.plan.computed + left for task, left in zip(tasks, blank, strict=True) if task.plan is not None]
        most = max(len(rows) for rows in computed)
        index = []
        for rows in computed:
            taken = set(rows.tolist())
            spare = [i for i in range(longest - 1, -1, -1) if i not in taken]  # computing a known row is harmless
            index.append(sorted([*taken, *spare[: most - len(rows)]]))
        stacks: list[list[KV]] = [[] for _ in self.layout.task_layers]
        for task, left in zip(tasks, blank, strict=True):
            for stack, kv in zip(stacks, self._moved(task), strict=True):
                stack.append((_padded(kv[0], left), _padded(kv[1], left)))
        kv = {
            layer: (torch.stack([k for k, _ in stack]), torch.stack([v for _, v in stack]))
            for layer, stack in zip(self.layout.task_layers, stacks, strict=True)
        }
        return GivenRows(kv, torch.tensor(index, device=self.model.device))

    def _moved(self, task: Task) -> list[KV]:
        """For each stored layer the donor's rows in the target's order, keys turned to the target's positions."""
        assert task.donor is not None
        assert task.plan is not None
        keys, values = (part.to(self.model.device) for part in task.donor.top_layer_kv)
        self._check(keys)
        return moved_rows(self.model, torch.stack([keys, values]), task.plan, np.arange(keys.shape[2]))

    def _check(self, keys: torch.Tensor) -> None:
        config = self.model.config
        want = (len(self.layout.task_layers), config.num_key_value_heads, config.head_dim)
        got = (keys.shape[0], keys.shape[1], keys.shape[3])
        if want != got or keys.dtype != self.model.dtype:
            raise ModelError(
                f"the task's state is of another model: (layers, heads, dim) {got} in {keys.dtype}, this model has {want} "
                f"in {self.model.dtype}: keep one cache of tasks for each model (`epoch`)"
            )


def _padded(rows: torch.Tensor, left: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, 0, left, 0))
