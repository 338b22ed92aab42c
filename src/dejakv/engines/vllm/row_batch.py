"""Rows of prompts as the sequences of one forward: each contiguous run of rows is one.

A sequence's queries are the run, its length is the end of the run, its blocks are the prompt's. A causal mask that is aligned to
the end of a sequence, as in every chunked prefill, is then right for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.engines.vllm.layout import slots_of


@dataclass(frozen=True)
class Rows:
    """Rows of one prompt.

    ids        their tokens `[k]`
    places     where they are in the prompt `[k]`, ascending
    block_ids  the prompt's blocks; no row lies behind them
    shift      what the model is told to add to the places
    """

    ids: torch.Tensor
    places: torch.Tensor
    block_ids: Sequence[int]
    shift: int = 0

    @property
    def runs(self) -> int:
        return len(contiguous(self.places.cpu().numpy()))


@dataclass(frozen=True)
class Batch:
    """What a forward takes, on the host. Short runs come first: backends that treat single rows as decoding expect that.

    ids, positions, slots  `[tokens]`
    starts, lengths        of the sequences: `[sequences + 1]` and `[sequences]`, int32
    blocks                 `[sequences, most blocks]` int32
    of_prompt              which of the tokens are each prompt's rows, in the order of the rows
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    blocks: torch.Tensor
    of_prompt: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, prompts: Sequence[Rows], block_tokens: int) -> "Batch":
        runs = [
            (prompt, begin, end)
            for prompt, rows in enumerate(prompts)
            for begin, end in contiguous(rows.places.cpu().numpy())
        ]
        runs.sort(key=lambda run: run[2] - run[1])
        counts = [end - begin for _, begin, end in runs]
        places = [prompts[prompt].places[begin:end].cpu() for prompt, begin, end in runs]
        order: list[list[torch.Tensor]] = [[] for _ in prompts]
        ends = np.cumsum(counts)
        for (prompt, begin, end), stop in zip(runs, ends, strict=True):
            at = torch.arange(int(stop) - (end - begin), int(stop))
            order[prompt].append(torch.stack([torch.arange(begin, end), at]))
        most = max(len(rows.block_ids) for rows in prompts)
        blocks = torch.zeros(len(runs), most, dtype=torch.int32)
        for index, (prompt, _, _) in enumerate(runs):
            mine = prompts[prompt].block_ids
            blocks[index, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        return cls(
            torch.cat([prompts[prompt].ids[begin:end].cpu() for prompt, begin, end in runs]),
            torch.cat([there + prompts[run[0]].shift for run, there in zip(runs, places, strict=True)]),
            torch.cat(
                [slots_of(prompts[run[0]].block_ids, block_tokens, at) for run, at in zip(runs, places, strict=True)]
            ),
            torch.tensor([0, *ends.tolist()], dtype=torch.int32),
            torch.tensor([int(there[-1]) + 1 for there in places], dtype=torch.int32),
            blocks,
            tuple(_sorted(torch.cat(parts, dim=1)) for parts in order),
        )


def _sorted(pairs: torch.Tensor) -> torch.Tensor:
    """`pairs[1]` in the order of `pairs[0]`."""
    return pairs[1][pairs[0].argsort()]


def contiguous(places: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Begin and end of each run of consecutive places, as indices into them."""
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    bounds = [0, *cuts.tolist(), len(places)]
    return list(pairwise(bounds))
