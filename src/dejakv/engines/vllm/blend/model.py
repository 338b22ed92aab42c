"""What blends ask of the served model beside recomputed rows.

A blend moves the model's keys, needs forwards over rows that give what vLLM's forward gave, and
asks what a question attends to. The check computes with a stored state, which came from vLLM's own
forward of the same weights, in blocks of the request that is to be blended.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dejakv.blend.settings import first_asked
from dejakv.engines.tensors import tensor_view
from dejakv.engines.vllm import upstream
from dejakv.engines.vllm.blend.rotary import LayerRotaryTables
from dejakv.engines.vllm.blend.rows import NULL_BLOCK, PromptRows, RowForward
from dejakv.engines.vllm.blend.state import BlendDraft
from dejakv.engines.vllm.pages import PagedKV
from dejakv.engines.vllm.ranks import ALONE, SingleRank
from dejakv.store.base import StoredState

CHECKED_ROWS = 64
"""Rows that each check computes."""
GAP = 8
"""Rows left out in the middle of the checked ones, so that they make two runs."""
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}


@dataclass
class ModelCheck:
    """Checks of one worker's model.

    Attributes
    ----------
    lockstep : SingleRank
        The ranks, which check their parts together: a fault of one is a fault of all.
    checked : int
        Tokens of the longest checked state.
    problem : str
        Why blends are off, empty if they are not.
    """

    forward: RowForward
    paged: PagedKV
    rotary: LayerRotaryTables
    max_positions: int
    lockstep: SingleRank = ALONE
    checked: int = 0
    problem: str = ""
    _moves_verified: bool = False

    def rows(self, state: Sequence[StoredState], block_ids: tuple[int, ...]) -> int:
        """Return the maximum rows of a check with this state; 0 if there is nothing to check."""
        if self.problem or not state or self._count(state, block_ids) <= self.checked:
            return 0
        return CHECKED_ROWS if self._moves_verified else 2 * CHECKED_ROWS

    def check(self, state: Sequence[StoredState], block_ids: tuple[int, ...]) -> str:
        """Check the model with a stored, exact state, if it is longer than all checked ones.

        Faults far into a prompt show in a long state alone.

        Parameters
        ----------
        state : Sequence[StoredState]
            All parts of the state, first rows first.
        block_ids : tuple[int, ...]
            Blocks to compute in, which are overwritten.

        Returns
        -------
        str
            Why blends would be wrong; empty if they would not.
        """
        if not self.rows(state, block_ids):
            return self.problem

        count = self._count(state, block_ids)
        ids = torch.tensor(state[0].meta.token_ids[:count])
        for part in state:
            page = part.first // self.paged.block_tokens
            if page < len(block_ids):
                self.paged.put_pages(
                    (block_ids,), tensor_view(part.tensor)[0, 0, 0, : len(block_ids) - page], page
                )

        error = self._end_error(ids, block_ids)
        # Written this way round because NaN must fail, too.
        if not error <= self._limit:
            self.problem = self._off(
                f"recomputing the end of a stored state of {count} tokens gave another one", error
            )
        elif not self._moves_verified:
            error = self._move_error(ids, block_ids)
            self._moves_verified = error <= self._limit
            if not self._moves_verified:
                self.problem = self._off(
                    "a stored state that was computed again further on is not its moved self", error
                )

        # Last, so that a check that an error ended is made again.
        self.checked = count
        return self.problem

    def _count(self, state: Sequence[StoredState], block_ids: tuple[int, ...]) -> int:
        return min(state[0].meta.num_tokens, len(block_ids) * self.paged.block_tokens)

    @property
    def _limit(self) -> float:
        return TOLERANCE[self.paged.dtype]

    def _off(self, failure: str, error: float) -> str:
        return (
            f"blend was switched off: {failure} (relative error {error:.2g}, {self._limit:g} is "
            "allowed), so blends of this model"
            " on this attention backend would be wrong"
        )

    def _end_error(self, ids: torch.Tensor, block_ids: tuple[int, ...]) -> float:
        """Recompute the last rows among the others as they were stored; return the error."""
        count = len(ids)
        places = torch.arange(max(0, count - CHECKED_ROWS), count)
        middle = len(places) // 2
        # Blends compute several runs in one forward, so the check does, too.
        places = (
            torch.cat([places[: max(1, middle - GAP)], places[middle:]]) if middle > GAP else places
        )

        block = int(places[0]) // self.paged.block_tokens
        before = block * self.paged.block_tokens
        stored_state = self.paged.gather(block_ids[block:], count - before)
        blanked_state = stored_state.clone()
        # A row that the forward did not write must not pass as the stored one.
        in_blocks = self.paged.copies.upload(places - before)
        blanked_state.index_fill_(3, in_blocks, 0.0)
        self.paged.scatter(block_ids, before, blanked_state)

        self.forward.run([PromptRows(ids[places], places, block_ids)])
        recomputed_state = self.paged.gather(block_ids[block:], count - before)
        return self.lockstep.maximum(
            _error(*(each.index_select(3, in_blocks) for each in (recomputed_state, stored_state)))
        )

    def _move_error(self, ids: torch.Tensor, block_ids: tuple[int, ...]) -> float:
        """Compute the first rows at the last places that the model knows; return the error.

        Rotated attention sees distances alone, so their K are the stored ones, moved, and their V
        are the same.
        """
        places = torch.arange(min(len(ids), CHECKED_ROWS))
        shift = self.max_positions - len(places)
        if shift <= 0:
            return 0.0

        expected_state = self.paged.gather(block_ids, len(places))
        # Computed at shifted positions they must equal stored keys that are moved there.
        self.forward.run([PromptRows(ids[places], places, block_ids, shift)])
        source, target = (self.paged.copies.upload(each) for each in (places, places + shift))
        self.rotary.move(expected_state[0], source, target)
        return self.lockstep.maximum(
            _error(self.paged.gather(block_ids, len(places)), expected_state)
        )


def _error(computed: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the greatest distance of any layer's K or V, in units of the greatest value."""
    computed, expected = computed.float(), expected.float()
    return float((computed - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def question_attention(
    forward: RowForward, paged: PagedKV, draft: BlendDraft, block_ids: tuple[int, ...]
) -> torch.Tensor:
    """Measure how much the question attends to each token.

    One pass of the question's rows alone, to the prompt's last row, over the donors' state in the
    blocks. It writes only rows that the real pass computes again or that vLLM computes. The blocks
    end where vLLM begins to compute. The rows behind them are written to the null block, as far as
    it holds them.

    Returns
    -------
    Tensor, shape [n], float32
        Sum over the last third of the layers.
    """
    blocks = (*block_ids, NULL_BLOCK)
    room = min(len(draft.ids), len(blocks) * paged.block_tokens)
    rows = draft.plan.of_question(draft.tail).tokens
    rows = rows[rows < room]
    first, layers = first_asked(len(paged.caches)), len(paged.caches)

    # The question is the last run of these rows, and so of the forward's tokens.
    asking = int((rows >= len(draft.ids) - draft.tail).sum())
    # The queries are the last rows themselves, so only their own square is causal.
    later = torch.ones(asking, asking, dtype=torch.bool).triu(1)
    later = paged.copies.upload(later)
    windows = {upstream.window_of(paged.attention(layer)) for layer in range(first, layers)}
    outside: dict[int | None, torch.Tensor] = {
        window: paged.copies.upload(_outside(window, asking, room))
        for window in windows
        if window is not None
    }
    index = paged.page_index(blocks, room)
    attention = torch.zeros(layers - first, len(draft.ids), device=paged.device)

    def add_attention(layer: int, _prompt: int, query: torch.Tensor, _rows: torch.Tensor) -> None:
        if layer >= first:
            of_layer = paged.attention(layer)
            asked, keys = query[len(rows) - asking : len(rows)], paged.keys(index, layer, room)
            into = attention[layer - first, :room]
            hidden = outside.get(upstream.window_of(of_layer))
            _add_weights(asked, keys, later, hidden, *upstream.scale_and_cap(of_layer), into)

    forward.run([PromptRows(draft.ids[rows], rows, blocks)], on_queries=add_attention)
    return attention.sum(0)


def _outside(window: int, count: int, tokens: int) -> torch.Tensor:
    """Return which tokens the last `count` of `tokens` do not see for a window, `[k, tokens]`."""
    rows = torch.arange(tokens - count, tokens)
    return torch.arange(tokens) <= rows.unsqueeze(1) - window


def _add_weights(
    queries: torch.Tensor,
    keys: torch.Tensor,
    later: torch.Tensor,
    outside: torch.Tensor | None,
    scale: float,
    cap: float,
    into: torch.Tensor,
) -> None:
    """Sum how much the last rows attend to each token up to themselves.

    Parameters
    ----------
    queries : Tensor, shape [k, heads, head_dim]
        Rotated queries of these rows.
    keys : Tensor, shape [kv_heads, tokens, head_dim], float32
        Rotated keys of all tokens.
    later : bool Tensor, shape [k, k]
        Which of these rows come behind each of them.
    outside : bool Tensor, shape [k, tokens], or None
        Which tokens lie outside of the window of each of these rows; None without a window.
    scale, cap : float
        Factor of the scores, and their soft cap; 0.0 without one.
    into : Tensor, shape [tokens], float32
        Takes the sum over heads and rows.
    """
    count, heads, width = queries.shape
    # Grouped-query attention: the query heads that share a KV head lie side by side.
    by_head = torch.empty((heads, count, width), device=queries.device)
    by_head.copy_(queries.transpose(0, 1))
    by_group = by_head.view(keys.shape[0], -1, width)
    nothing = torch.empty((1, 1, 1), device=keys.device)
    scores = torch.baddbmm(nothing, by_group, keys.mT, beta=0, alpha=scale)
    scores = scores.view(heads, count, -1)

    if cap > 0.0:
        scores = cap * torch.tanh(scores / cap)
    scores[:, :, scores.shape[2] - count :].masked_fill_(later, -math.inf)
    if outside is not None:
        scores.masked_fill_(outside, -math.inf)
    torch.sum(scores.softmax(-1), (0, 1), out=into)
