"""Blend inside vLLM's worker: a similar donor's state, token by token, and the rows that differ computed afresh.

In a thread: token map, keys moved, rows that must be computed. In the engine loop: those rows, layer by layer. Maps, needs,
schedules and selectors are the transformers engine's (`dejakv.reuse`), and are made for the whole prompt as there. The last
rows are computed by vLLM, so what is handed over ends before them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.engines.tensors import borrowed
from dejakv.engines.vllm.buffers import Buffers, Lent
from dejakv.engines.vllm.llama import Decoder
from dejakv.errors import InputError
from dejakv.reuse.blend import BlendConfig, find, not_worth
from dejakv.reuse.schedule import Schedule
from dejakv.reuse.selector import Selector, choose, relative_error
from dejakv.reuse.token_map import Donors
from dejakv.store.base import Chunk

CHECKED_TOKENS = 64
Look = Callable[[int, torch.Tensor, torch.Tensor], object]
"""Sees a layer's number, its rows and their queries."""
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}


@dataclass(frozen=True)
class Draft:
    """What is known before the model runs.

    ids     target tokens `[n]`
    state   the donor's, in target order and keys moved: `[2, layers, kv_heads, n, head_dim]`
    forced  rows that are computed in every layer `[n]`; similarity of the map `[n]`
    stop    first row that vLLM computes by itself, in every layer
    tail    rows at the end that are the question, vLLM's among them
    lent    the memory of `state`, to be given back after use
    """

    ids: torch.Tensor
    state: torch.Tensor
    forced: torch.Tensor
    similarity: torch.Tensor
    schedule: Schedule
    selector: Selector
    stop: int
    tail: int
    lent: Lent | None = None


@dataclass(frozen=True)
class Blended:
    """The state of the tokens before `Draft.stop`, and rows computed of them: the mean over layers, rounded up."""

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
        self._checked: str | None = None

    def draft(self, token_ids: tuple[int, ...], stop: int, chunk: Chunk, buffers: Buffers) -> Draft:
        """To be called in a thread: everything that needs no forward pass. `token_ids` are the whole prompt's, and vLLM
        computes those from `stop` on.

        Raises: InputError for a prompt that has too little in common with the donor, or is cheaper from its exact prefix.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        found, must = find(ids, Donors.of(chunk.meta.token_ids), self._embed, self.config, self._ends)
        reason = not_worth(self.config, must, len(self.decoder.layers))
        if reason:
            raise InputError(reason)
        source = torch.from_numpy(found.source).to(self.device)
        donor = borrowed(chunk.tensor).to(self.device)
        if donor.dtype != self.dtype:
            raise InputError(f"the donor's state is {donor.dtype}, this model's is {self.dtype}")
        shape = (*donor.shape[:3], len(ids), donor.shape[4])
        lent = buffers.lend(shape, self.dtype) if self.device.type == "cpu" else None
        state = lent.tensor if lent else torch.empty(shape, dtype=self.dtype, device=self.device)
        torch.index_select(donor, 3, source, out=state)
        self.decoder.move(state[0], source, torch.arange(len(ids), device=self.device))
        return Draft(
            torch.from_numpy(ids).to(self.device),
            state,
            torch.from_numpy(must.forced).to(self.device),
            torch.from_numpy(found.similarity).to(self.device),
            self.config.schedule_for(len(self.decoder.layers)),
            Selector(self.config.selector),
            stop,
            must.tail,
            lent,
        )

    @torch.inference_mode()
    def mix(self, draft: Draft, exact: torch.Tensor | None = None) -> Blended:
        """Computes the rows that need it.

        exact  state of the first tokens as vLLM holds it, `[2, layers, kv_heads, m, head_dim]`: it stands as it is
        """
        held = 0
        if exact is not None:
            held = exact.shape[3]
            draft.state[:, :, :, :held] = exact
        forced = int(draft.forced[held : draft.stop].sum())
        if draft.selector.asks and forced < _most_rows(draft, held):
            scores = self.question_attention(draft, held)
        else:
            scores = draft.selector.fixed_scores(draft.similarity)
        total = self._pass(draft, held, scores)
        return Blended(draft.state[:, :, :, : draft.stop], math.ceil(total / len(self.decoder.layers)))

    @torch.inference_mode()
    def question_attention(self, draft: Draft, held: int = 0) -> torch.Tensor:
        """How much the question attends to each token, over the layers that the selector asks: `[n]` float32.

        One pass of its rows alone, to the prompt's last one, over the donor's state. It writes only rows that the real pass
        computes again or that vLLM computes.
        """
        n, layers = len(draft.ids), len(self.decoder.layers)
        alone = torch.arange(n, device=self.device) >= n - draft.tail
        none = Schedule((0.0,) * layers)
        question = replace(draft, forced=alone, schedule=none, selector=Selector("similarity"), stop=n)
        seen = torch.zeros(n, device=self.device)
        first = draft.selector.first_asked(layers)

        def look(index: int, rows: torch.Tensor, queries: torch.Tensor) -> None:
            if index >= first:
                seen.add_(self.decoder.weights(index, rows, queries, draft.state[0, index]))

        self._pass(question, held, torch.zeros(n, device=self.device), look)
        return seen

    def _pass(self, draft: Draft, held: int, scores: torch.Tensor, look: Look | None = None) -> int:
        """Computes, of the rows from `held` to `draft.stop`, the forced ones and those of the best scores, in place; the rows
        of all layers together. A selector that compares V makes its own scores behind the first layer."""
        layers = len(self.decoder.layers)
        rows = torch.arange(held, draft.stop, device=self.device)
        hidden, residual = None, None
        total = 0
        for index, wanted in enumerate(_rows(draft, held)):
            keys, values = draft.state[0, index], draft.state[1, index]
            if not wanted and not draft.forced[rows].any():
                break  # the schedule pays for no more than what vLLM computes
            compares = draft.selector.deviation and index > 0
            if wanted < len(rows) and not compares:
                kept = choose(scores[rows], draft.forced[rows], wanted)
                rows = rows[kept]
                if hidden is not None and residual is not None:
                    hidden, residual = hidden[kept], residual[kept]
            if hidden is None:
                hidden = self.decoder.embed(draft.ids[rows])
            normed, residual = self.decoder.normed(index, hidden, residual)
            if wanted < len(rows) and compares:
                kept = choose(self._deviation(draft, index, rows, normed), draft.forced[rows], wanted)
                rows, normed, residual = rows[kept], normed[kept], residual[kept]
            total += len(rows)
            q, k, v = self.decoder.project(index, normed)
            q, k = self.decoder.rotate(index, rows, q, k)
            keys[:, rows] = k.view(len(rows), *keys.shape[::2]).transpose(0, 1).to(self.dtype)
            values[:, rows] = v.reshape(len(rows), *values.shape[::2]).transpose(0, 1).to(self.dtype)
            if look is not None:
                look(index, rows, q)
            if index < layers - 1:  # what the last layer would put out is vLLM's to compute, in the tail
                mixed = self.decoder.attend(index, rows, q, keys, values)
                hidden, residual = self.decoder.feed(index, mixed, residual)
        return total

    def check(self, chunk: Chunk) -> str:
        """Recomputes the first tokens of a stored, exact state and compares; empty if this forward is the engine's.

        Done once, with the first donor: its state came from vLLM's own forward of the same weights.
        """
        if self._checked is None:
            count = min(CHECKED_TOKENS, chunk.meta.num_tokens)
            there = borrowed(chunk.tensor)[:, :, :, :count].to(self.device)
            layers = len(self.decoder.layers)
            ids = torch.tensor(chunk.meta.token_ids[:count], device=self.device)
            every = torch.ones(count, dtype=torch.bool, device=self.device)
            draft = Draft(
                ids,
                torch.zeros_like(there),
                every,
                every.float(),
                Schedule((1.0,) * layers),
                Selector("similarity"),
                stop=count,
                tail=1,
            )
            made = self.mix(draft).state
            error = float((made.float() - there.float()).abs().max() / there.float().abs().max().clamp_min(1e-6))
            limit = TOLERANCE[self.dtype]
            self._checked = (
                ""
                if error <= limit
                else (
                    f"blend was switched off: recomputing a stored state gave another one (relative error {error:.2g},"
                    f" {limit:g} is allowed), so this model is not built as it seems"
                )
            )
        return self._checked

    def _deviation(self, draft: Draft, index: int, rows: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """How far the donor's V, or K and V, of a layer are from the rows' own: `[rows]`."""
        keys, values = draft.state[0, index], draft.state[1, index]
        q, k, v = self.decoder.project(index, normed)
        fresh = v.reshape(len(rows), *values.shape[::2]).transpose(0, 1)
        scores = relative_error(fresh[None], values[None, :, rows].to(fresh.dtype))
        if draft.selector.name == "kv":
            k = self.decoder.rotate(index, rows, q, k)[1].view(len(rows), *keys.shape[::2]).transpose(0, 1)
            scores = scores + relative_error(k[None], keys[None, :, rows].to(k.dtype))
        return scores

    def _embed(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        with torch.inference_mode():
            vectors = self.decoder.embed(torch.from_numpy(np.ascontiguousarray(ids)).to(self.device))
        return vectors.float().cpu().numpy()


def _rows(draft: Draft, held: int) -> list[int]:
    """How many of the rows from `held` to `draft.stop` the schedule gives each layer. It pays for the whole prompt, so the
    forced rows that vLLM computes are taken off."""
    n = len(draft.ids)
    theirs = int(draft.forced[draft.stop :].sum())
    layers = range(len(draft.schedule.shares))
    return [max(0, round(draft.schedule.rows(index, n) * (n - held) / n) - theirs) for index in layers]


def _most_rows(draft: Draft, held: int) -> int:
    """Of the layers that do not compute all rows, the most that one computes; 0 if all compute all."""
    return max((count for count in _rows(draft, held) if count < draft.stop - held), default=0)
