"""Blend inside vLLM's worker: the rows that differ are computed afresh among the state of similar prompts.

What can be done beforehand is a `Draft`, made in a thread. In the engine loop the donors' state is put into the request's blocks,
and the model runs over the rows that need it (`rows`). They are the same rows in all layers, known before it runs. Maps,
forced tokens, ranking and choice are the transformers engine's (`dejakv.blend`), and are made for the whole prompt as there.
The last rows are computed by vLLM.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.blend.settings import BlendConfig, first_asked
from dejakv.engines.vllm.blend.drafts import Draft, Drafting, Read
from dejakv.engines.vllm.blend.mixing import BlendPart, Mixing
from dejakv.engines.vllm.blend.model_check import ModelCheck
from dejakv.engines.vllm.blend.rotary import Rotary
from dejakv.engines.vllm.blend.rows import NULL_BLOCK, More, PromptRows, RowForward
from dejakv.engines.vllm.pages import Buffers, PagedKV
from dejakv.engines.vllm.ranks import ALONE, Lockstep
from dejakv.errors import InputError, ModelError
from dejakv.store.base import ChunkMeta


class Blender:
    """Blends with one model.

    max_positions  places that the model knows
    step_rows      rows that a step computes at most
    ends           ids of tokens that end a sentence
    lockstep       the ranks that compute the same rows, each its own heads
    """

    def __init__(
        self,
        forward: RowForward,
        rotary: Rotary,
        paged: PagedKV,
        config: BlendConfig,
        max_positions: int,
        step_rows: int,
        ends: NDArray[np.int64] | None = None,
        lockstep: Lockstep = ALONE,
    ) -> None:
        self.forward = forward
        self.rotary = rotary
        self.paged = paged
        self.config = config
        self.lockstep = lockstep
        self.model_check = ModelCheck(forward, paged, rotary, max_positions, self.lockstep)
        self._step_rows = step_rows
        self._ends = ends
        # A lookup in the model's own table would be a collective, and maps are made in threads.
        self._table = forward.embedding_table() if self.lockstep.ranks > 1 else None

    def draft(
        self,
        token_ids: Sequence[int],
        first: int,
        stop: int,
        donors: Sequence[ChunkMeta],
        read: Read,
        buffers: Buffers,
        gone: Sequence[str] = (),
    ) -> Draft:
        """To be called in a thread; see `Drafting.draft`. Raises: InputError also for a question that no step has room for."""
        drafting = Drafting(
            self.config,
            self.paged.dtype,
            self.paged.device,
            self._embed,
            self.rotary.move,
            buffers,
            self._ends,
            # What other ranks have checked by now is not known in a thread, and all must check the same.
            self.model_check.checked if self.lockstep.ranks == 1 else 0,
            self._checkable(first, stop),
        )
        made = drafting.draft(token_ids, first, stop, donors, read, gone)
        if made.asks > self._step_rows:
            raise InputError(
                f"the question has {made.asks} tokens, and a step computes at most {self._step_rows}: raise"
                " max_num_batched_tokens, or choose blend_selector=similarity, which asks no question"
            )
        return made

    def rows_checked(self, draft: Draft, block_ids: tuple[int, ...]) -> int:
        """How many rows `check` computes at most."""
        return self.model_check.rows(draft.proof, self._own(draft, block_ids))

    @torch.inference_mode()
    def check(self, draft: Draft, block_ids: tuple[int, ...]) -> None:
        """Checks the model with a donor, in blocks that are the request's own.

        Raises: ModelError if blends would be wrong.
        """
        draft.wait()
        problem = self.model_check.check(draft.proof, self._own(draft, block_ids))
        if problem:
            raise ModelError(problem)

    def _checkable(self, first: int, stop: int) -> int:
        """How many tokens fit in `_own` at least, where the blocks end with `stop`."""
        return max(0, self._blocks(stop) - self._blocks(first)) * self.paged.block_tokens

    def _own(self, draft: Draft, block_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Blocks without a token that vLLM held before: others may share those."""
        return block_ids[self._blocks(draft.plan.first) :]

    def _blocks(self, tokens: int) -> int:
        """How many blocks so many tokens take."""
        return -(-tokens // self.paged.block_tokens)

    @torch.inference_mode()
    def begin(self, draft: Draft, block_ids: tuple[int, ...]) -> Mixing:
        """Puts the donors' state into the blocks and chooses the rows; of several ranks the first one does. Tokens before
        `draft.plan.first`, whose blocks others may share, stand as vLLM holds them."""
        plan = draft.plan
        draft.wait()
        self.paged.scatter(block_ids, plan.first, draft.state[:, :, :, plan.first : plan.end])
        asked = 0
        if plan.asks:
            scores, asked = question_attention(self.forward, self.paged, draft, block_ids)
            plan = plan.with_attention(self.lockstep.summed(scores))
        chosen = torch.zeros(plan.end, dtype=torch.uint8, device=self.paged.device)
        chosen[plan.tokens] = 1
        rows = self.lockstep.of_first(chosen).nonzero().squeeze(1)
        return Mixing(replace(draft, plan=plan), block_ids, self.paged.block_tokens, rows, asked)

    @torch.inference_mode()
    def advance(self, blends: Sequence[Mixing], room: int) -> int:
        """Computes the next rows of these blends, at most `room` of them, in one forward of the model; how many it computed."""
        parts: list[BlendPart] = []
        runs = self.forward.most_runs
        for mixing in blends:
            if room <= 0 or (runs is not None and runs <= 0):
                break
            if not len(mixing.rows):
                continue
            part = mixing.next(room, runs)
            room -= len(part.rows.places)
            runs = None if runs is None else runs - part.rows.runs
            parts.append(part)
        if not parts:
            return 0

        def written(layer: int, prompt: int, keys: torch.Tensor, values: torch.Tensor) -> More | None:
            return parts[prompt].moved(layer, keys, values)

        self.forward.run([part.rows for part in parts], written=written)
        return sum(len(part.rows.places) for part in parts)

    def _embed(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        there = torch.from_numpy(np.ascontiguousarray(ids))
        vectors = self.forward.embed(there) if self._table is None else self._table[there]
        return vectors.float().cpu().numpy()


def question_attention(
    forward: RowForward, paged: PagedKV, draft: Draft, block_ids: tuple[int, ...]
) -> tuple[torch.Tensor, int]:
    """Over the last third of the layers: `[n]` float32; and the rows computed for it.

    One pass of the question's rows alone, to the prompt's last one, over the donors' state in the blocks. It writes only rows that
    the real pass computes again or that vLLM computes. The blocks end where vLLM begins to compute; the rows behind them are
    written to the null block, as far as it holds them.
    """
    blocks = (*block_ids, NULL_BLOCK)
    room = min(len(draft.ids), len(blocks) * paged.block_tokens)
    rows = draft.plan.of_question(draft.tail).tokens
    rows = rows[rows < room]
    first = first_asked(len(paged.caches))
    asking = rows >= len(draft.ids) - draft.tail
    seen = torch.zeros(len(draft.ids), device=paged.device)

    def asked(layer: int, _prompt: int, queries: torch.Tensor) -> None:
        if layer >= first:
            keys = paged.keys(blocks, layer, room)
            seen[:room] += _weights(queries[asking], keys, paged.attention(layer).impl)

    forward.run([PromptRows(draft.ids[rows], rows, blocks)], asked=asked)
    return seen, len(rows)


def _weights(queries: torch.Tensor, keys: torch.Tensor, impl: Any) -> torch.Tensor:
    """How much the last rows attend to each token up to themselves, summed over heads and rows: `[tokens]` float32.

    queries  of these rows `[k, heads, head_dim]`
    keys     of all tokens `[kv_heads, tokens, head_dim]`
    """
    count, heads, width = queries.shape
    by_group = queries.float().transpose(0, 1).reshape(keys.shape[0], -1, width)
    scores = torch.bmm(by_group, keys.float().mT).mul_(impl.scale).view(heads, count, -1)
    cap = getattr(impl, "logits_soft_cap", None) or 0.0
    if cap > 0.0:
        scores = cap * torch.tanh(scores / cap)
    later = torch.ones(count, count, dtype=torch.bool, device=keys.device).triu(1)
    scores[:, :, scores.shape[2] - count :].masked_fill_(later, -math.inf)
    return scores.softmax(-1).sum((0, 1))
