"""Blend inside vLLM's worker: the rows that differ are computed afresh among the state of similar prompts.

What can be done beforehand is a `Draft`, made in a thread. In the engine loop only rows are computed, layer by layer. Maps, needs,
schedules, selectors and the rule for rows are the transformers engine's (`dejakv.reuse`), and are made for the whole prompt as
there. The last rows are computed by vLLM, so what is handed over ends before them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.engines.tensors import borrowed
from dejakv.engines.vllm.buffers import Buffers
from dejakv.engines.vllm.drafts import Draft, Drafting, Read
from dejakv.engines.vllm.llama import Decoder
from dejakv.reuse.blend import BlendConfig
from dejakv.reuse.offsets import Correction, correct, corrections
from dejakv.reuse.rows import RowPlan
from dejakv.reuse.schedule import Schedule
from dejakv.reuse.selector import Selector, relative_error
from dejakv.store.base import Chunk, ChunkMeta

CHECKED_ROWS = 64
"""Rows at the end of a stored state that are computed again to check the model."""
Look = Callable[[int, torch.Tensor, torch.Tensor], object]
"""Sees a layer's number, its rows and their queries."""
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}


@dataclass(frozen=True)
class Blended:
    """The state of the tokens before `Draft.plan.stop`, and rows computed of them: the mean over layers, rounded up."""

    state: torch.Tensor
    computed: int


class Blender:
    """Blends with one model. `dtype` and `device` are the KV cache's; `ends` are ids of tokens that end a sentence."""

    def __init__(
        self,
        decoder: Decoder,
        config: BlendConfig,
        dtype: torch.dtype,
        device: torch.device,
        ends: NDArray[np.int64] | None = None,
    ) -> None:
        self.decoder = decoder
        self.config = config
        self.dtype = dtype
        self.device = device
        self._ends = ends
        self._checked = 0
        self._problem = ""

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
        layers = len(self.decoder.layers)
        drafting = Drafting(
            self.config,
            layers,
            self.dtype,
            self.device,
            self._embed,
            self.decoder.move,
            buffers,
            self._ends,
            self._checked,
        )
        return drafting.draft(token_ids, first, stop, donors, read, gone)

    @torch.inference_mode()
    def mix(self, draft: Draft, exact: torch.Tensor | None = None) -> Blended:
        """Computes the rows that need it.

        exact  state of the first `draft.plan.first` tokens as vLLM holds it, `[2, layers, kv_heads, m, head_dim]`: it stands
        """
        plan = draft.plan
        draft.wait()
        if exact is not None:
            draft.state[:, :, :, : plan.first] = exact
        if plan.selector.asks and plan.ranks:
            plan = replace(plan, threshold=None, scores=self.question_attention(draft))
        total = self._pass(draft, plan)
        return Blended(draft.state[:, :, :, : plan.end], math.ceil(total / len(self.decoder.layers)))

    @torch.inference_mode()
    def question_attention(self, draft: Draft) -> torch.Tensor:
        """How much the question attends to each token, over the layers that the selector asks: `[n]` float32.

        One pass of its rows alone, to the prompt's last one, over the donors' state. It writes only rows that the real pass
        computes again or that vLLM computes.
        """
        seen = torch.zeros(len(draft.ids), device=self.device)
        first = draft.plan.selector.first_asked(len(self.decoder.layers))

        def look(index: int, rows: torch.Tensor, queries: torch.Tensor) -> None:
            if index < first:
                return
            asking = rows >= len(draft.ids) - draft.tail
            seen.add_(self.decoder.weights(index, rows[asking], queries[asking], draft.state[0, index]))

        self._pass(draft, draft.plan.of_question(draft.tail), look)
        return seen

    def _pass(self, draft: Draft, plan: RowPlan, look: Look | None = None) -> int:
        """Computes the rows of a plan in place; the rows of all layers together."""
        layers = len(self.decoder.layers)
        rows = torch.arange(plan.first, plan.end, device=self.device)
        hidden, residual = None, None
        moved: tuple[int, list[Correction]] | None = None
        total = 0
        for index, wanted in enumerate(plan.counts):
            keys, values = draft.state[0, index], draft.state[1, index]
            scores = plan.known_scores(index) if wanted < len(rows) else None
            if scores is not None:
                kept = plan.kept(index, rows, scores[rows])
                rows = rows[kept]
                if hidden is not None and residual is not None:
                    hidden, residual = hidden[kept], residual[kept]
            if not len(rows):
                break  # the schedule pays for no more than what vLLM computes
            if hidden is None:
                hidden = self.decoder.embed(draft.ids[rows])
            normed, residual = self.decoder.normed(index, hidden, residual)
            if wanted < len(rows) and scores is None:
                kept = plan.kept(index, rows, self._deviation(draft, plan, index, rows, normed))
                rows, normed, residual = rows[kept], normed[kept], residual[kept]
                if not len(rows):
                    break
            total += len(rows)
            q, k, v = self.decoder.project(index, normed)
            q, k = self.decoder.rotate(index, rows, q, k)
            fresh_keys = k.view(len(rows), *keys.shape[::2]).transpose(0, 1)
            fresh_values = v.reshape(len(rows), *values.shape[::2]).transpose(0, 1)
            if plan.runs is not None and index:  # the first layer's K and V depend on the token alone
                if moved is None or len(rows) < moved[0]:
                    moved = len(rows), corrections(plan.runs, rows)
                correct(keys[None], fresh_keys[None], moved[1])
                correct(values[None], fresh_values[None], moved[1])
            keys[:, rows] = fresh_keys.to(self.dtype)
            values[:, rows] = fresh_values.to(self.dtype)
            if look is not None:
                look(index, rows, q)
            if index < layers - 1:  # what the last layer would put out is vLLM's to compute, in the tail
                mixed = self.decoder.attend(index, rows, q, keys, values)
                hidden, residual = self.decoder.feed(index, mixed, residual)
        return total

    @torch.inference_mode()
    def check(self, chunk: Chunk | None) -> str:
        """Recomputes the last tokens of a stored, exact state and compares; empty if this forward is the engine's.

        The state came from vLLM's own forward of the same weights. What a model does only far into a prompt shows there alone,
        so a donor that is longer than all that were checked is checked too.
        """
        if self._problem or chunk is None or chunk.meta.num_tokens <= self._checked:
            return self._problem
        self._checked = count = chunk.meta.num_tokens
        there = borrowed(chunk.tensor).to(self.device)
        last = torch.arange(count, device=self.device) >= count - CHECKED_ROWS
        alone = Schedule((0.0,) * len(self.decoder.layers))
        plan = RowPlan(alone, Selector("similarity"), torch.ones(count, device=self.device), last)
        draft = Draft(torch.tensor(chunk.meta.token_ids, device=self.device), there.clone(), plan, tail=1)
        draft.state[:, :, :, last] = 0.0
        made, real = self.mix(draft).state[:, :, :, last].float(), there[:, :, :, last].float()
        error = float((made - real).abs().max() / real.abs().max().clamp_min(1e-6))
        limit = TOLERANCE[self.dtype]
        if not error <= limit:
            self._problem = (
                f"blend was switched off: recomputing the end of a stored state of {count} tokens gave another one (relative"
                f" error {error:.2g}, {limit:g} is allowed), so this model is not built as it seems"
            )
        return self._problem

    def _deviation(
        self, draft: Draft, plan: RowPlan, index: int, rows: torch.Tensor, normed: torch.Tensor
    ) -> torch.Tensor:
        """How far the donors' V, or K and V, of a layer are from the rows' own: `[rows]`."""
        keys, values = draft.state[0, index], draft.state[1, index]
        q, k, v = self.decoder.project(index, normed)
        fresh = v.reshape(len(rows), *values.shape[::2]).transpose(0, 1)
        scores = relative_error(fresh[None], values[None, :, rows].to(fresh.dtype))
        if plan.selector.name == "kv":
            k = self.decoder.rotate(index, rows, q, k)[1].view(len(rows), *keys.shape[::2]).transpose(0, 1)
            scores = scores + relative_error(k[None], keys[None, :, rows].to(k.dtype))
        return scores

    def _embed(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        with torch.inference_mode():
            vectors = self.decoder.embed(torch.from_numpy(np.ascontiguousarray(ids)).to(self.device))
        return vectors.float().cpu().numpy()
