"""Whether a forward over rows gives what vLLM's own gave, and whether keys move as the model rotates them.

Both are computed from a stored state, which came from vLLM's own forward of the same weights, in blocks of the request that is to
be blended.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dejakv.engines.tensors import borrowed
from dejakv.engines.vllm.blend.rotary import Rotary
from dejakv.engines.vllm.blend.rows import PromptRows, RowForward
from dejakv.engines.vllm.pages import PagedKV
from dejakv.engines.vllm.ranks import ALONE, Lockstep
from dejakv.store.base import Chunk, joined

CHECKED_ROWS = 64
"""Rows that each check computes."""
GAP = 8
"""Rows in the middle of them that are not computed, so that there are two runs."""
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}


@dataclass
class ModelCheck:
    """The checks of one worker's model.

    lockstep  the ranks, which check their parts together: a fault of one is a fault of all
    checked   tokens of the longest checked state
    problem   why blend is off, empty if it is not
    """

    forward: RowForward
    paged: PagedKV
    rotary: Rotary
    max_positions: int
    lockstep: Lockstep = ALONE
    checked: int = 0
    problem: str = ""
    _moves: bool = False

    def rows(self, state: Sequence[Chunk], block_ids: tuple[int, ...]) -> int:
        """Maximum rows computed by a check with this state; 0 if there is nothing to check."""
        if self.problem or not state or self._count(state, block_ids) <= self.checked:
            return 0
        return CHECKED_ROWS if self._moves else 2 * CHECKED_ROWS

    def check(self, state: Sequence[Chunk], block_ids: tuple[int, ...]) -> str:
        """Check with a stored, exact state, given by parts, if longer than all checked ones: faults far into a prompt show there alone.
        Returns the problem, or "". `block_ids` are overwritten."""
        if not self.rows(state, block_ids):
            return self.problem
        count = self._count(state, block_ids)
        ids = torch.tensor(state[0].meta.token_ids[:count], device=self.paged.device)
        error = self._end(ids, state, block_ids)
        if not error <= self._limit:
            self.problem = self._off(f"recomputing the end of a stored state of {count} tokens gave another one", error)
        elif not self._moves:
            error = self._moved(ids, state, block_ids)
            self._moves = error <= self._limit
            if not self._moves:
                self.problem = self._off(
                    "a stored state that was computed again further on is not its moved self", error
                )
        self.checked = count  # last: a check that an error ended is made again
        return self.problem

    def _count(self, state: Sequence[Chunk], block_ids: tuple[int, ...]) -> int:
        return min(state[0].meta.num_tokens, len(block_ids) * self.paged.block_tokens)

    @property
    def _limit(self) -> float:
        return TOLERANCE[self.paged.dtype]

    def _off(self, what: str, error: float) -> str:
        return (
            f"blend was switched off: {what} (relative error {error:.2g}, {self._limit:g} is allowed), so blends of this model"
            " on this attention backend would be wrong"
        )

    def _entries(self, state: Sequence[Chunk], start: int, stop: int) -> torch.Tensor:
        """Of its tokens `start`, which begins a page, to `stop - 1`."""
        pages = joined(state, start, stop)
        assert pages is not None
        return self.paged.entries(borrowed(pages)[0, 0, 0], stop - start).to(self.paged.device)

    def _end(self, ids: torch.Tensor, state: Sequence[Chunk], block_ids: tuple[int, ...]) -> float:
        """The last rows, among the others as they were stored."""
        count = len(ids)
        places = torch.arange(max(0, count - CHECKED_ROWS), count, device=ids.device)
        middle = len(places) // 2
        places = torch.cat([places[: max(1, middle - GAP)], places[middle:]]) if middle > GAP else places
        block = int(places[0]) // self.paged.block_tokens
        before = block * self.paged.block_tokens
        for part in state:
            page = part.first // self.paged.block_tokens
            if page < len(block_ids):
                self.paged.put_pages((block_ids,), borrowed(part.tensor)[0, 0, 0, : len(block_ids) - page], page)
        there = self._entries(state, before, count)
        end = there.clone()
        end[:, :, :, places - before] = 0.0
        self.paged.scatter(block_ids, before, end)
        self.forward.run([PromptRows(ids[places], places, block_ids)])
        made = self.paged.gather(block_ids[block:], count - before)
        return self.lockstep.most(_error(made[:, :, :, places - before], there[:, :, :, places - before]))

    def _moved(self, ids: torch.Tensor, state: Sequence[Chunk], block_ids: tuple[int, ...]) -> float:
        """The first rows, at the last places that the model knows: rotated attention sees distances alone, so their K are the
        stored ones, moved, and their V are the same."""
        places = torch.arange(min(len(ids), CHECKED_ROWS), device=ids.device)
        shift = self.max_positions - len(places)
        if shift <= 0:
            return 0.0
        self.forward.run([PromptRows(ids[places], places, block_ids, shift)])
        wanted = self._entries(state, 0, len(places))
        self.rotary.move(wanted[0], places, places + shift)
        return self.lockstep.most(_error(self.paged.gather(block_ids, len(places)), wanted))


def _error(made: torch.Tensor, real: torch.Tensor) -> float:
    """The greatest distance of any layer's K or V, in units of the greatest value of all."""
    made, real = made.float(), real.float()
    return float((made - real).abs().max() / real.abs().max().clamp_min(1e-6))
