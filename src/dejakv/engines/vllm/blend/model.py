"""What blends ask of the served model beside recomputed rows.

A blend moves the model's keys, needs forwards over rows that give what vLLM's forward gave, and
asks what a question attends to. The check computes with a stored state, which came from vLLM's own
forward of the same weights, in blocks of the request that is to be blended.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from dejakv.blend.rope import turn
from dejakv.blend.settings import first_asked
from dejakv.blend.slices import split_runs
from dejakv.engines.tensors import tensor_view
from dejakv.engines.vllm import upstream
from dejakv.engines.vllm.blend.rows import NULL_BLOCK, PromptRows, RowForward
from dejakv.engines.vllm.blend.state import BlendDraft
from dejakv.engines.vllm.pages import PagedKV
from dejakv.engines.vllm.ranks import ALONE, SingleRank
from dejakv.errors import ModelError
from dejakv.store.base import StoredState

CHECKED_ROWS = 64
"""Rows that each check computes."""
GAP = 8
"""Rows left out in the middle of the checked ones, so that they make two runs."""
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}


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
    first = first_asked(len(paged.caches))

    # Indices, since a mask would be counted anew in each layer.
    asking = paged.copies.upload((rows >= len(draft.ids) - draft.tail).nonzero().squeeze(1))
    # The queries are the last rows themselves, so only their own square is causal.
    later = torch.ones(len(asking), len(asking), dtype=torch.bool, device=paged.device).triu(1)
    index = paged.page_index(blocks, room)
    attention = torch.zeros(len(draft.ids), device=paged.device)

    def add_attention(layer: int, _prompt: int, query: torch.Tensor, rows: torch.Tensor) -> None:
        if layer >= first:
            keys = paged.keys(index, layer, room)
            attention[:room] += _weights(
                query[rows[asking]], keys, later, *upstream.scale_and_cap(paged.attention(layer))
            )

    forward.run([PromptRows(draft.ids[rows], rows, blocks)], on_queries=add_attention)
    return attention


def _weights(
    queries: torch.Tensor, keys: torch.Tensor, later: torch.Tensor, scale: float, cap: float
) -> torch.Tensor:
    """Sum how much the last rows attend to each token up to themselves.

    Parameters
    ----------
    queries : Tensor, shape [k, heads, head_dim]
        Rotated queries of these rows.
    keys : Tensor, shape [kv_heads, tokens, head_dim]
        Rotated keys of all tokens.
    later : bool Tensor, shape [k, k]
        Which of these rows come behind each of them.
    scale, cap : float
        Factor of the scores, and their soft cap; 0.0 without one.

    Returns
    -------
    Tensor, shape [tokens], float32
        Sum over heads and rows.
    """
    count, heads, width = queries.shape
    # Grouped-query attention: the query heads that share a KV head lie side by side.
    by_group = queries.float().transpose(0, 1).reshape(keys.shape[0], -1, width)
    scores = torch.bmm(by_group, keys.float().mT).mul_(scale).view(heads, count, -1)

    if cap > 0.0:
        scores = cap * torch.tanh(scores / cap)
    scores[:, :, scores.shape[2] - count :].masked_fill_(later, -math.inf)
    return scores.softmax(-1).sum((0, 1))
