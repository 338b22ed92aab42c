"""Rows of prompts as the sequences of one forward: each contiguous run of rows is one.

A sequence's queries are the run, its length is the end of the run, its blocks are the prompt's. A causal mask that is aligned to
the end of a sequence, as in every chunked prefill, is then right for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dejakv.blend.slices import contiguous


@dataclass(frozen=True)
class PromptRows:
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
    """What a forward takes, on the host but for `of_prompt`. Short runs come first: backends that treat single rows as decoding
    expect that.

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
    def of(cls, prompts: Sequence[PromptRows], block_tokens: int) -> "Batch":
        places = np.concatenate([rows.places.cpu().numpy() for rows in prompts])
        prompt = np.repeat(np.arange(len(prompts)), [len(rows.places) for rows in prompts])
        tables = np.zeros((len(prompts), max(len(rows.block_ids) for rows in prompts)), dtype=np.int64)
        for number, rows in enumerate(prompts):
            tables[number, : len(rows.block_ids)] = rows.block_ids
        bounds = np.array(contiguous(places, prompt))
        sizes = bounds[:, 1] - bounds[:, 0]
        runs = np.argsort(sizes, kind="stable")
        tokens = np.argsort(np.repeat(sizes, sizes), kind="stable")  # runs of one size keep their order, and stay whole
        places_then, prompt_then = places[tokens], prompt[tokens]
        shifts = np.array([rows.shift for rows in prompts])
        ends = bounds[runs, 1] - 1
        return cls(
            torch.cat([rows.ids.cpu() for rows in prompts])[torch.from_numpy(tokens)],
            torch.from_numpy(places_then + shifts[prompt_then]),
            torch.from_numpy(
                tables[prompt_then, places_then // block_tokens] * block_tokens + places_then % block_tokens
            ),
            torch.from_numpy(np.append(0, sizes[runs].cumsum()).astype(np.int32)),
            torch.from_numpy((places[ends] + 1).astype(np.int32)),
            torch.from_numpy(tables[prompt[ends]].astype(np.int32)),
            tuple(
                torch.from_numpy(tokens.argsort()[prompt == number]).to(rows.places.device)
                for number, rows in enumerate(prompts)
            ),
        )
