"""Blend inside vLLM's worker: the rows that differ are computed afresh among the state of similar prompts.

What can be done beforehand is a `Draft`, made in a thread. In the engine loop the donors' state is put into the request's blocks,
and the model runs over the rows that need it (`row_forward`). They are the same rows in all layers, known before it runs. Maps,
needs, selectors and the rule for rows are the transformers engine's (`dejakv.reuse`), and are made for the whole prompt as there.
The last rows are computed by vLLM.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.engines.vllm.buffers import Buffers
from dejakv.engines.vllm.drafts import Draft, Drafting, Read
from dejakv.engines.vllm.mixing import Mixing, Part
from dejakv.engines.vllm.model_check import ModelCheck
from dejakv.engines.vllm.paged import PagedKV
from dejakv.engines.vllm.question import question_attention
from dejakv.engines.vllm.rotary import Rotary
from dejakv.engines.vllm.row_forward import More, RowForward
from dejakv.errors import ModelError
from dejakv.reuse.blend import BlendConfig
from dejakv.store.base import ChunkMeta


class Blender:
    """Blends with one model. `ends` are ids of tokens that end a sentence, `max_positions` places that the model knows."""

    def __init__(
        self,
        forward: RowForward,
        rotary: Rotary,
        paged: PagedKV,
        config: BlendConfig,
        max_positions: int,
        ends: NDArray[np.int64] | None = None,
    ) -> None:
        self.forward = forward
        self.rotary = rotary
        self.paged = paged
        self.config = config
        self.model_check = ModelCheck(forward, paged, rotary, max_positions)
        self._ends = ends

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
        """To be called in a thread; see `Drafting.draft`."""
        drafting = Drafting(
            self.config,
            len(self.paged.caches),
            self.paged.dtype,
            self.paged.device,
            self._embed,
            self.rotary.move,
            buffers,
            self._ends,
            self.model_check.checked,
        )
        return drafting.draft(token_ids, first, stop, donors, read, gone)

    @torch.inference_mode()
    def begin(self, draft: Draft, block_ids: tuple[int, ...]) -> Mixing:
        """Puts the donors' state into the blocks and chooses the rows. Tokens before `draft.plan.first`, whose blocks others may
        share, stand as vLLM holds them.

        Raises: ModelError if the check of the model shows that blends would be wrong.
        """
        plan = draft.plan
        draft.wait()
        problem = self.model_check.check(draft.proof, block_ids[-(-plan.first // self.paged.block_tokens) :])
        if problem:
            raise ModelError(problem)
        self.paged.scatter(block_ids, plan.first, draft.state[:, :, :, plan.first : plan.end])
        asked = 0
        if plan.selector.asks and plan.ranks:
            scores, asked = question_attention(self.forward, self.paged, draft, block_ids)
            plan = replace(plan, threshold=None, scores=scores)
        return Mixing(replace(draft, plan=plan), block_ids, self.paged.block_tokens, plan.fixed(), asked)

    @torch.inference_mode()
    def advance(self, blends: Sequence[Mixing], room: int) -> int:
        """Computes the next rows of these blends, at most `room` of them, in one forward of the model; how many it computed."""
        parts: list[Part] = []
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
        vectors = self.forward.embed(torch.from_numpy(np.ascontiguousarray(ids)))
        return vectors.float().cpu().numpy()
